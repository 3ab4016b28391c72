"""What Apple's compiler refuses and clang, reading Metal as C++, does not: a check of source text.

The rules are those of the Metal Shading Language specification (restrictions, address spaces, attributes) and of torch.mps. A rule
misses what a macro hides, so the emulator applies them to preprocessed source. None should refuse legal Metal, but for recursion,
which kernels may use and should not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.metal import source as msl

SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
TYPES = {
    *SCALARS, *(f"{packed}{scalar}{size}" for scalar in SCALARS for packed in ("", "packed_") for size in (2, 3, 4)),
    *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)), "size_t", "ptrdiff_t", "unsigned", "void", "auto",
}  # fmt: skip
MATRICES = {f"{scalar}{columns}x{rows}" for scalar in ("half", "float") for columns in (2, 3, 4) for rows in (2, 3, 4)}
SPACES = ("device", "constant", "threadgroup", "thread")
QUALIFIERS = {*SPACES, "const", "volatile", "static", "constexpr", "inline", "typename", "coherent"}
NO_TYPES = QUALIFIERS | {"return", "typedef", "unsigned", "signed", "sizeof", "struct", "using"}  # a name after these is no declaration
# Names that a program cannot give to anything.
RESERVED = (
    (TYPES - {"auto", "void", "unsigned"})
    | MATRICES
    | {*SPACES, "threadgroup_imageblock", "ray_data", "object_data", "kernel", "vertex", "fragment", "sampler", "assert"}
    | {f"{kind}{dimension}" for kind in ("texture", "depth") for dimension in ("1d", "2d", "3d", "cube", "2d_array", "2d_ms")}
)
ATTRIBUTES = {
    *msl.ATTRIBUTES, "buffer", "kernel", "host_name", "max_total_threads_per_threadgroup", "threadgroup", "function_constant",
    "dispatch_threads_per_threadgroup", "dispatch_simdgroups_per_threadgroup", "grid_origin", "grid_size", "maybe_unused",
    "thread_index_in_quadgroup", "quadgroup_index_in_threadgroup", "quadgroups_per_threadgroup", "dispatch_quadgroups_per_threadgroup",
}  # fmt: skip
FORBIDDEN = {
    "double": "no GPU has double",
    "new": "no dynamic memory", "delete": "no dynamic memory",
    "virtual": "no virtual functions", "override": "no virtual functions",
    "throw": "no exceptions", "try": "no exceptions", "catch": "no exceptions", "noexcept": "noexcept is not supported",
    "dynamic_cast": "no run-time types", "typeid": "no run-time types",
    "goto": "goto is not supported", "register": "register is not supported", "thread_local": "thread_local is not supported",
    "wchar_t": "wchar_t is not supported", "asm": "asm is not supported", "printf": "no standard library",
    "concept": "C++20", "requires": "C++20", "consteval": "C++20", "constinit": "C++20", "co_await": "C++20",
}  # fmt: skip
INCLUDES = re.compile(r"<(metal_\w+|MetalPerformancePrimitives/\w+\.h)>|\"[^\"]+\"")
LAMBDAS_FROM = 320  # the version that allows them


@dataclass(frozen=True)
class Finding:
    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


def lint(source: str, metal_version: int = 310) -> list[Finding]:
    """Findings in order of lines. Lambdas depend on the oldest version that the source is compiled for."""
    found = [(i, f"not ASCII: {c!r}") for i, c in enumerate(source) if ord(c) > 127]
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', lambda m: f'"{"_" * (len(m[0]) - 2)}"', msl.strip_comments(source))
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.M)  # without directives
    for check in (words, attributes, reserved, storage, classes, recursion):
        found += check(code)
    found += includes(msl.strip_comments(source))
    found += pointers(text, code)
    found += kernels(msl.strip_comments(source))
    if metal_version < LAMBDAS_FROM:
        found += lambdas(code)
    return [Finding(msl.line_of(source, at), message) for at, message in sorted(set(found))]


def includes(text: str) -> Iterator[tuple[int, str]]:
    for m in re.finditer(r"^[ \t]*#[ \t]*include[ \t]*(.*?)[ \t]*$", text, re.M):
        if not INCLUDES.fullmatch(m[1]):
            yield m.start(), f"{m[1]} is no header of Metal"


def words(code: str) -> Iterator[tuple[int, str]]:
    for m in re.finditer(r"\b(\w+)\b", code):
        if m[1] in FORBIDDEN:
            yield m.start(), f"{m[1]}: {FORBIDDEN[m[1]]}"
        elif m[1].startswith("__builtin_"):
            yield m.start(), f"{m[1]}: the compiler's builtins are not Metal"
    for m in re.finditer(r"\bstd\s*::", code):
        yield m.start(), "std: there is no C++ standard library, use metal"
    for m in re.finditer(r"\blong\s+long\b", code):
        yield m.start(), "long long is not supported: long has 64 bits"
    for m in re.finditer(r"\bmain\s*\(", code):
        yield m.start(), "no function may be called main"


def attributes(code: str) -> Iterator[tuple[int, str]]:
    for m in re.finditer(r"\[\[\s*([\w:]+)", code):
        if m[1] not in ATTRIBUTES and "::" not in m[1]:
            near = difflib.get_close_matches(m[1], ATTRIBUTES, 1)
            yield m.start(), f"unknown attribute {m[1]}" + (f", did you mean {near[0]}?" if near else "")


def reserved(code: str) -> Iterator[tuple[int, str]]:
    for m in re.finditer(r"(?:\b(?P<type>[A-Za-z_]\w*)\s+|[>*&]\s*)(?P<name>\w+)\s*(?=[=;,)\[](?!\[))", code):
        if m["name"] in RESERVED and m["type"] not in NO_TYPES:
            yield m.start("name"), f"{m['name']} is a word of the language and cannot be a name"


def declared_types(text: str) -> set[str]:
    types = TYPES | MATRICES
    named = r"\b(?:struct|class|typename|using)\s+(\w+)|\btypedef\s[^;]*?(\w+)\s*;"
    types |= {name for pair in re.findall(named, text) for name in pair if name}
    for name, value in re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(\w+)[ \t]*$", text, re.M):
        types |= {name} if value in types else set()
    return types


POINTER = re.compile(
    r"(?P<words>(?:\b[A-Za-z_]\w*\s+)*)\b(?P<type>[A-Za-z_]\w*)(?:\s+const)?\s*(?P<kind>[*&])\s*(?:const\s+)?\w+\s*(?=[=,);\[(:])"
)


def pointers(text: str, code: str) -> Iterator[tuple[int, str]]:
    """Every pointer and reference names the address space that it points to."""
    types = declared_types(text)
    for m in POINTER.finditer(code):
        if m["type"] in types and not set(m["words"].split()) & {*SPACES, "return", "using", "case"}:
            yield m.start("type"), f"a {'pointer' if m['kind'] == '*' else 'reference'} without an address space: {m[0].strip()}"


def statements(code: str) -> Iterator[tuple[int, int, str]]:
    """Position, depth and text of what stands between ; { and }, brackets of initialisers aside. Namespaces add no depth."""
    depth, start, scopes = 0, 0, list[bool]()
    for i, c in enumerate(code):
        if c not in ";{}":
            continue
        part = code[start:i]
        yield start + len(part) - len(part.lstrip()), depth, part.strip() + c
        if c == "{":
            scopes.append(re.search(r"\bnamespace\b[\s\w:]*$", part) is None)
            depth += scopes[-1]
        elif c == "}" and scopes:
            depth -= scopes.pop()
        start = i + 1


NO_VARIABLE = re.compile(
    r"(typedef|using|struct|class|enum|union|template|extern|friend|namespace|return|static_assert|public|private)\b"
)
VARIABLE = re.compile(r"(?:[\w:]+(?:\s*<[^;]*>)?[\s*&]+)+\w+\s*(?:\[[^;]*\]\s*)*(=|;|\{$)")


def storage(code: str) -> Iterator[tuple[int, str]]:
    """Variables outside functions, and static ones anywhere, lie in the constant address space."""
    for at, depth, part in statements(code):
        is_static = re.match(r"static\b", part) is not None
        head = part.split("=")[0]
        if "(" in head or NO_VARIABLE.match(part) or re.search(r"\bconstant\b", head):
            continue
        if (depth == 0 or is_static) and VARIABLE.match(part):
            kind = "static variable" if is_static else "variable at program scope"
            yield at, f"a {kind} must be in the constant address space: {' '.join(head.split())}"


def classes(code: str) -> Iterator[tuple[int, str]]:
    for m in re.finditer(r"(?<!enum )\b(?:struct|class)\s+\w+\s*:(?!:)", code):
        yield m.start(), "derived classes are not supported"


def lambdas(code: str) -> Iterator[tuple[int, str]]:
    for m in re.finditer(r"(?:[=(,]|\breturn)\s*(\[[&=\w\s,]*\])\s*[({]", code):
        yield m.start(1), "lambdas need Metal 3.2"


def recursion(code: str) -> Iterator[tuple[int, str]]:
    definitions: dict[str, list[tuple[int, str]]] = {}
    for m in re.finditer(r"\b(\w+)\s*\((?:[^(){};]|\([^()]*\))*\)\s*(?:const\s*)?\{", code):
        if m[1] not in ("if", "for", "while", "switch"):
            brace = m.end() - 1
            definitions.setdefault(m[1], []).append((m.start(), code[brace : msl.closing(code, brace)]))
    single = {name: found[0] for name, found in definitions.items() if len(found) == 1}  # overloads may call each other
    calls = {name: {c for c in re.findall(r"\b(\w+)\s*(?:<[^<>;]*>)?\s*\(", body) if c in single} for name, (_, body) in single.items()}
    for name, (at, _) in single.items():
        reached, todo = set[str](), list(calls[name])
        while todo:
            if (callee := todo.pop()) not in reached:
                reached.add(callee)
                todo += calls[callee]
        if name in reached:
            yield at, f"{name} calls itself"


NOT_VOID = re.compile(
    r"(?:\[\[\s*kernel\s*\]\]|(?<![\w\[ ])kernel\b)(?:\s*\[\[[^\]]*\]\])*\s*(?!void\b|decltype\b|\w+_t\b|inline\b)(\w+)\s+\w+\s*\("
)


def kernels(text: str) -> Iterator[tuple[int, str]]:
    """Signatures: void, buffers in device, constant or threadgroup memory, indices below 31, one kernel per name."""
    code = re.sub(r"^[ \t]*#[^\n]*", lambda m: " " * len(m[0]), text, flags=re.M)
    for m in NOT_VOID.finditer(code):
        yield m.start(), f"a kernel returns void, not {m[1]}"
    try:
        msl.kernel_functions(code)
    except msl.SourceError as e:
        yield e.at, e.problem
        return
    for m in msl.KERNEL.finditer(code):
        for parameter in msl.split_arguments(code[m.end() : msl.closing(code, m.end() - 1)]):
            plain = re.sub(r"\[\[.*?\]\]", "", parameter)
            if "*" in plain or "&" in plain:
                if not re.search(r"\b(device|constant|threadgroup)\b", plain):
                    yield m.start(), f"kernel {m['name']}: a buffer is in device, constant or threadgroup memory: {plain.strip()}"
            elif not any(f"[[{a}" in re.sub(r"\s", "", parameter) for a in msl.ATTRIBUTES):
                yield m.start(), f"kernel {m['name']}: a parameter is a buffer or has an attribute: {plain.strip()}"
