"""The lint refuses what Apple's compiler refuses, each rule by one line of source, and the legal line beside it passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.metal.lint import lint

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc").rglob("*.metal")) + sorted(Path(__file__).parent.glob("*.metal"))
LIMIT = 31

# What is wrong, a source with it, and a source without.
RULES = {
    "not ASCII": ("// a\u00d7b", "// a*b"),
    "is no header of Metal": ("#include <cmath>", "#include <metal_math>"),
    "double": ("float f(float x) { return float(double(x)); }", "float f(float x) { return x; }"),
    "no dynamic memory": ("void f() { thread int* p = new int; }", "void f() { int renew = 0; }"),
    "no virtual functions": ("struct A { virtual void f(); };", "struct A { void f(); };"),
    "no exceptions": ("void f() { throw 1; }", "void f() { }"),
    "noexcept": ("void f() noexcept { }", "void f() { }"),
    "no run-time types": ("void f(thread int* p) { typeid(p); }", "void f(thread int* p) { }"),
    "goto": ("void f() { goto end; end: return; }", "void f() { return; }"),
    "thread_local": ("void f() { thread_local int x = 0; }", "void f() { thread int x = 0; }"),
    "no standard library": ('void f() { printf("x"); }', "void f() { }"),
    "std: there is no C\\+\\+ standard library": (
        "float f(float x) { return std::sqrt(x); }",
        "float f(float x) { return metal::sqrt(x); }",
    ),
    "long long": ("void f() { long long x = 0; }", "void f() { long x = 0; }"),
    "C\\+\\+20": ("template <typename T> requires true void f(T x) { }", "template <typename T> void f(T x) { }"),
    "the compiler's builtins": ("int f(int x) { return __builtin_popcount(x); }", "int f(int x) { return popcount(x); }"),
    "no function may be called main": ("void main() { }", "void main_loop() { }"),
    "did you mean thread_position_in_grid": (
        "kernel void k(device int* x, uint i [[thread_position_in_gird]]) { }",
        "kernel void k(device int* x, uint i [[thread_position_in_grid]]) { }",
    ),
    "unknown attribute": ("[[noreturn]] void f() { }", "[[maybe_unused]] void f() { }"),
    "fragment is a word of the language": ("void f() { int fragment = 0; }", "void f() { int fragments = 0; }"),
    "half is a word of the language": ("void f(int a, float half) { }", "void f(half a, float b) { float c = float(half(b)); }"),
    "sampler is a word of the language": ("struct A { int sampler; };", "struct A { int samples; };"),
    "a pointer without an address space: const float": (
        "float f(const float* x) { return x[0]; }",
        "float f(device const float* x) { return x[0]; }",
    ),
    "a pointer without an address space: S": ("struct S { int a; }; void f(S* s) { }", "struct S { int a; }; void f(thread S* s) { }"),
    "a pointer without an address space: const X": (
        "#define X half\nvoid f(const X* x) { }",
        "#define X half\nvoid f(constant X* x) { int X_n = 1, y = X_n * 2; }",
    ),
    "a reference without an address space: T": ("template <typename T> void f(T& x) { }", "template <typename T> void f(thread T& x) { }"),
    "a reference without an address space: auto": (
        "void f(thread int* p) { auto& x = p[0]; }",
        "void f(thread int* p) { thread auto& x = p[0]; }",
    ),
    "variable at program scope": (
        "constexpr int N = 4;",
        "constant constexpr int N = 4; typedef int T; int f(int x) { constexpr int M = 3; return M; }",
    ),
    "a variable at program scope .*: const float TABLE": ("const float TABLE[2] = {1, 2};", "constant float TABLE[2] = {1, 2};"),
    "static variable": (
        "void f() { static int n = 0; }",
        "struct A { static constexpr constant int n = 0; static int f(int x) { return x; } };",
    ),
    "derived classes": ("struct A { }; struct B : A { };", "struct A { }; struct B { A a; }; enum class E : int { e };"),
    "lambdas need Metal 3.2": ("void f() { auto g = [](int x) { return x; }; }", "void f() { int a[2] = {1, 2}; int b = a[1]; }"),
    "f calls itself": ("int f(int x) { return x ? f(x - 1) : 0; }", "int f(int x) { return x; } int f(int2 v) { return f(v.x); }"),
    "g calls itself": (
        "int f(int x); int g(int x) { return f(x); } int f(int x) { return g(x); }",
        "int f(int x) { return x; } int g(int x) { return f(x); }",
    ),
    "a kernel returns void": ("kernel int k(device int* x) { return 0; }", "kernel void k(device int* x) { }"),
    "a buffer is in device": ("kernel void k(thread int* x) { }", "kernel void k(device int* x, constant int& n) { }"),
    "a parameter is a buffer or has an attribute": (
        "kernel void k(int n) { }",
        "kernel void k(constant int& n, uint i [[thread_position_in_grid]]) { }",
    ),
    "kernels cannot be overloaded": (
        "kernel void k(device int* x) { } kernel void k(device float* x) { }",
        "kernel void k(device int* x) { } kernel void l(device int* x) { }",
    ),
    "buffer index 31 is beyond 30": ("kernel void k(device int* x [[buffer(31)]]) { }", "kernel void k(device int* x [[buffer(30)]]) { }"),
    "buffer index 2 is used twice": (
        "kernel void k(device int* x [[buffer(2)]], device int* y [[buffer(2)]]) { }",
        "kernel void k(device int* x [[buffer(2)]], device int* y [[buffer(3)]]) { }",
    ),
    "buffer index 31 is": (
        f"kernel void k({', '.join(f'device int* x{i}' for i in range(LIMIT + 1))}) {{ }}",
        f"kernel void k({', '.join(f'device int* x{i}' for i in range(LIMIT))}) {{ }}",
    ),
    "is a scalar, ushort or uint": (
        "kernel void k(uint2 i [[thread_index_in_simdgroup]]) { }",
        "kernel void k(uint2 i [[thread_position_in_grid]]) { }",
    ),
    "cannot be set through torch.mps": (
        "kernel void k(threadgroup int* x [[threadgroup(0)]]) { }",
        "kernel void k() { threadgroup int x[2]; }",
    ),
}


@pytest.mark.parametrize("message", RULES)
def test_rule_finds_its_mistake_on_its_line_and_passes_legal_source(message: str):
    wrong, right = RULES[message]
    head = "// one line of comment: double, new, std::, [[thread_position]]\n"
    findings = lint(head + wrong + "\n")
    assert len(findings) >= 1 and all(f.line == 1 + wrong.count("\n") + 1 for f in findings), findings
    assert re.search(message, "; ".join(map(str, findings))), findings
    assert lint(head + right + "\n") == []


def test_lambdas_are_legal_from_metal_3_2_on():
    source = RULES["lambdas need Metal 3.2"][0]
    assert lint(source, 310) and not lint(source, 320)


def test_findings_come_in_order_with_their_lines():
    findings = lint("void f() {\n  double x = 0;\n}\nint n = 0;\nvoid g(int* p) { }\n")
    assert [f.line for f in findings] == [2, 4, 5]
    assert str(findings[0]) == "line 2: double: no GPU has double"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_shipped_sources_pass(path: Path):
    assert not list(map(str, lint(path.read_text())))
