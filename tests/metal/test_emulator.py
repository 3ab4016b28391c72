"""The emulator has the interface of torch.mps.compile_shader, its arithmetic, its limits and its refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.metal import emulator, toolchain
from tests.metal.emulator import MetalError, ShaderLibrary, compile_shader, settings

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
# Example of torch.mps.compile_shader.
FULL = "kernel void full(device float* out, constant float& val, uint idx [[thread_position_in_grid]]) { out[idx] = val; }\n"
KERNELS = FULL + """
kernel void copy(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void add_one(device float* x, uint i [[thread_position_in_grid]]) { x[i] += 1.0f; }
kernel void numbers(device long* y, constant long& a, constant int& b, constant short& c, constant float& d, constant half& e,
                    constant float* list) {
  y[0] = a; y[1] = b; y[2] = c; y[3] = long(d * 4.0f); y[4] = long(e * 4.0h); y[5] = long(list[2] * 4.0f);
}
constant float TABLE[3] = {1.5f, 2.5f, 3.5f};
constant constexpr int LAST = 2;
kernel void table(device float* y, uint i [[thread_position_in_grid]]) { y[i] = TABLE[i] + TABLE[LAST]; }
struct Shape { long rows, columns; };
kernel void shape(device long* y, constant Shape& shape) { y[0] = shape.rows * 100 + shape.columns; }
kernel void unused(device float* y, device const int* x, constant int& use, uint i [[thread_position_in_grid]]) {
  y[i] = use ? float(x[i]) : 1.0f;
}
kernel void places(device int* y, uint3 grid [[threads_per_grid]], uint3 at [[thread_position_in_grid]],
                   ushort3 in [[thread_position_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]],
                   uint3 size [[threads_per_threadgroup]], uint3 groups [[threadgroups_per_grid]],
                   uint t [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                   ushort sg [[simdgroup_index_in_threadgroup]], ushort sgs [[simdgroups_per_threadgroup]], ushort width [[threads_per_simdgroup]]) {
  device int* row = y + ((at.z * grid.y + at.y) * grid.x + at.x) * 12;
  row[0] = in.x; row[1] = in.y; row[2] = in.z; row[3] = group.x; row[4] = group.y; row[5] = group.z;
  row[6] = size.x * 100 + size.y * 10 + size.z; row[7] = groups.x * 100 + groups.y * 10 + groups.z;
  row[8] = t; row[9] = lane; row[10] = sg; row[11] = sgs * 100 + width;
}
kernel void arithmetic(device float* y, device half* h, device bfloat* b, constant float& tiny) {
  y[0] = 1.0f + tiny * tiny - 1.0f;
  y[1] = fma(1.0f + tiny, 1.0f + tiny, -1.0f - 2.0f * tiny);
  y[2] = (1.0f + tiny) * (1.0f + tiny) - 1.0f - 2.0f * tiny;
  y[3] = sizeof(0.1) + 10 * sizeof(long) + 100 * sizeof(half3) + 1000 * sizeof(packed_half4);
  const half two = half(2048.0f);
  h[0] = two + 1.0h + 1.0h;
  h[1] = half(float(two) + 1.0f + 1.0f);
  const bfloat big = bfloat(256.0f);
  b[0] = big + bfloat(1.0f) + bfloat(1.0f);
  b[1] = bfloat(float(big) + 1.0f + 1.0f);
  const float4 v = float4(float2(1.0f, 2.0f), half2(3.0h, 4.0h).yx);
  y[4] = dot(v, float4(1.0f, 10.0f, 100.0f, 1000.0f));
  y[5] = as_type<float>(0x40490fdb) + float(as_type<half>(ushort(0x3c00)));
  y[6] = max(v, float4(2.5f)).x + min(3, -4) + clamp(7.0f, 0.0f, 2.0f) + select(1.0f, 2.0f, v.x < v.y);
  y[6] += float(any(v < 0.0f)) + float(all(v > 0.0f));
  y[7] = float(popcount(0xffu)) + float(clz(1u)) + float(ctz(8));
}
[[kernel]] [[max_total_threads_per_threadgroup(32 * 2)]] void limited(device float* x, uint i [[thread_position_in_grid]]) {
  threadgroup float a[3], b[100];
  a[0] = x[i]; b[0] = a[0];
}
"""
SUMS = HEAD + "kernel void sums(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = simd_sum(x[i]); }"


@pytest.fixture(scope="module")
def library() -> ShaderLibrary:
    return compile_shader(HEAD + KERNELS)


def sums() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(320, generator=generator), torch.empty(320)
    compile_shader(SUMS).sums(x, y)
    torch.testing.assert_close(y, x.view(-1, 32).sum(1).repeat_interleave(32), rtol=1e-4, atol=1e-5)
    return y


# ---- calls ----


def test_example_of_the_torch_documentation(library: ShaderLibrary):
    x = torch.zeros(16)
    library.full(x, 3.14)
    assert torch.equal(x, torch.full((16,), 3.14))
    assert set(dir(library)) == set(re.findall(r"void (\w+)\(", KERNELS))


def test_numbers_are_int64_and_float32_unless_cast(library: ShaderLibrary):
    y = torch.zeros(6, dtype=torch.int64)
    library.numbers(y, 2**40 + 1, 2**32 - 7, -3, 0.25, 0.5, [1.0, 2.0, 3.5], threads=1, arg_casts={3: "int16", 5: "fp16"})
    assert y.tolist() == [2**40 + 1, -7, -3, 1, 2, 14]
    library.shape(y, [3, 7], threads=1)
    assert y[0] == 307


@pytest.mark.parametrize(
    "arguments, casts, message",
    [
        ((1, 2, 3, 4, 0.5, [1.0]), {5: "fp16"}, "argument 4, which is torch.int64 and read as 4-byte float"),
        ((1, 2, 3, 0.5, 0.5, [1.0]), None, "argument 5, which is torch.float32 and read as 2-byte float"),
        ((1, 2, 3, 0.5, 0.5, [1.0]), "int32", "argument 1 has 4 bytes, the kernel reads 8"),
        ((1, 2, 3, 0.5, 0.5), {5: "fp16"}, "buffer 6 is not set"),
        ((1, 2, 3, 0.5, 0.5, []), {5: "fp16"}, "Empty list"),
        ((1, 2, 3, 0.5, 0.5, "x"), {5: "fp16"}, "Unsupported argument type"),
        ((1, 2, 3, 0.5, 0.5, [1.0]), {5: "fp8"}, "Unsupported cast"),
        ((1, 2, 3, 0.5, 0.5, [0.0] * 2000), {5: "fp16"}, "8000 bytes, the limit is 4096"),
        ((1, 2, 3, 0.5, 0.5, [1.0, 2.0]), {5: "fp16"}, "out-of-bounds access.*argument 6"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(library: ShaderLibrary, arguments: tuple[Any, ...], casts: Any, message: str):
    y = torch.zeros(6, dtype=torch.int64)
    with settings(checked=True), pytest.raises(RuntimeError, match=message):
        library.numbers(y, *arguments, threads=1, arg_casts=casts)
    assert not y.any()


def test_tensors_bind_at_their_offset_and_lose_their_strides(library: ShaderLibrary):
    x, y = torch.arange(20.0), torch.zeros(20)
    library.copy(x[3:], y[5:], threads=4)
    assert y.tolist() == [0.0] * 5 + [3.0, 4.0, 5.0, 6.0] + [0.0] * 11
    library.copy(x[::2], y, threads=4)
    assert y[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_views_of_one_storage_share_it(library: ShaderLibrary):
    x = torch.arange(8.0)
    library.copy(x[:4], x[4:], threads=4)
    library.add_one(x, threads=8)
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0] * 2


def test_threads_default_to_the_elements_of_the_first_tensor(library: ShaderLibrary):
    x = torch.zeros(2000)  # more than one threadgroup, the last one partial
    library.add_one(x)
    assert (x == 1).all()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("order", emulator.ORDERS)
def test_positions_in_a_ragged_grid(library: ShaderLibrary, order: str, checked: bool):
    """`threads` is the total: threadgroups at the border are smaller."""
    grid, group = (10, 5, 3), (8, 3, 2)
    y = torch.full((3, 5, 10, 12), -1, dtype=torch.int32)
    with settings(order=order, checked=checked):
        library.places(y, threads=grid, group_size=group)
    for z in range(3):
        for row in range(5):
            for x in range(10):
                at = (x, row, z)
                size = [min(g, n - p // g * g) for p, n, g in zip(at, grid, group)]
                inside, groups = [p % g for p, g in zip(at, group)], [p // g for p, g in zip(at, group)]
                t, threads = inside[0] + size[0] * (inside[1] + size[1] * inside[2]), size[0] * size[1] * size[2]
                packed = [size[0] * 100 + size[1] * 10 + size[2], 222, t, t % 32, t // 32, -(-threads // 32) * 100 + 32]
                assert y[z, row, x].tolist() == [*inside, *groups, *packed]


@pytest.mark.parametrize(
    "grid, error, message",
    [
        (dict(threads=2048, group_size=2048), ValueError, "Threadgroup size exceeds 1024 limit"),
        (dict(threads=(4, 4), group_size=(4,)), RuntimeError, "the same number"),
        (dict(threads=(1, 1, 1, 1)), RuntimeError, "1 to 3 dimensions"),
        (dict(threads=0), MetalError, "nothing to dispatch"),
        (dict(threads=4, group_size=0), MetalError, "nothing to dispatch"),
    ],
)
def test_grids_are_checked(library: ShaderLibrary, grid: dict[str, Any], error: type[Exception], message: str):
    x = torch.zeros(2048)
    with pytest.raises(error, match=message):
        library.add_one(x, **grid)
    assert not x.any()


def test_limits_of_a_kernel(library: ShaderLibrary):
    kernel = library.limited
    assert kernel.max_threads_per_threadgroup == 64 and kernel.thread_execution_width == 32
    assert kernel.static_thread_group_memory_length == 16 + 400
    with pytest.raises(ValueError, match="Threadgroup size exceeds 64 limit"):
        kernel(torch.zeros(128), group_size=128)
    with settings(max_threads=48):
        assert kernel.max_threads_per_threadgroup == 48 and library.add_one.max_threads_per_threadgroup == 48


def test_tensors_of_another_type_fail_only_where_they_are_read(library: ShaderLibrary):
    y, wrong = torch.zeros(32), torch.zeros(32)
    library.unused(y, wrong, 0)
    assert (y == 1).all()
    with pytest.raises(MetalError, match="argument 1, which is torch.float32 and read as 4-byte integer"):
        library.unused(y, wrong, 1)
    with pytest.raises(MetalError, match="is on meta"):
        library.unused(y, wrong.to("meta"), 0)


def test_kernels_and_limits_that_do_not_exist(library: ShaderLibrary):
    with pytest.raises(RuntimeError, match="Failed to create function state object for: nothing"):
        library.nothing
    with pytest.raises(MetalError, match="32 arguments, the limit is 31"):
        library.full(*[torch.zeros(1)] * 32)
    large = compile_shader(HEAD + "kernel void k(device float* x) { threadgroup float a[4096], b[4096], c; c = a[0] + b[0]; x[0] = c; }")
    with pytest.raises(RuntimeError, match="32784 bytes of threadgroup memory exceed the limit of 32768"):
        large.k


# ---- arithmetic ----


def test_arithmetic_is_that_of_safe_math(library: ShaderLibrary):
    y, h, b = torch.empty(8), torch.empty(2, dtype=torch.half), torch.empty(2, dtype=torch.bfloat16)
    library.arithmetic(y, h, b, 2.0**-13, threads=1)
    assert y[:3].tolist() == [0.0, 2.0**-26, 0.0]  # products are rounded unless fma is called
    assert y[3] == 4 + 80 + 800 + 8000  # literals are float, three elements take the room of four
    assert h.tolist() == [2048.0, 2050.0] and b.tolist() == [256.0, 258.0]  # rounded after each operation
    assert y[4] == 1 + 20 + 400 + 3000 and y[6] == 2.5 - 4 + 2 + 2 + 0 + 1 and y[7] == 8 + 31 + 3
    assert y[5] == torch.tensor(torch.pi, dtype=torch.float32) + 1


def test_conversions_round_as_torch_does():
    source = """
kernel void convert(device const float* x, device half* h, device bfloat4* b, uint i [[thread_position_in_grid]]) {
  h[i] = half(x[i]);
  b[i] = bfloat4(float4(x[i], -x[i], x[i], 0.0f));
}"""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator) * torch.exp2(torch.randint(-149, 128, (5000,), generator=generator))
    x = torch.cat([x, torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 3.4e38])])
    h, b = torch.empty_like(x, dtype=torch.half), torch.empty((x.numel(), 4), dtype=torch.bfloat16)
    compile_shader(HEAD + source).convert(x, h, b)
    for got, want in ((h, x.half()), (b[:, 0], x.bfloat16()), (b[:, 1], -x.bfloat16())):
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7)) and torch.equal(got.isnan(), want.isnan())


def test_orders_of_simd_sum_differ_in_rounding_only():
    results = []
    for order in emulator.SIMD_SUMS:
        with settings(simd_sum=order):
            results.append(sums())
    for i, a in enumerate(results):
        assert all(not torch.equal(a, b) for b in results[:i])


def test_program_scope_constants(library: ShaderLibrary):
    y = torch.zeros(3)
    library.table(y)
    assert y.tolist() == [5.0, 6.0, 7.0]


SIMD = """
kernel void simd(device const float* x, device float* y, device int* z, uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  const float v = x[i];
  y[i] = simd_max(v);
  y[n + i] = simd_min(v);
  y[2 * n + i] = simd_shuffle(v, ushort(31 - i % 32));
  y[3 * n + i] = simd_shuffle_xor(v, 5);
  y[4 * n + i] = simd_shuffle_up(v, 3);
  y[5 * n + i] = simd_shuffle_down(v, 3);
  y[6 * n + i] = simd_broadcast(v, 7);
  y[7 * n + i] = simd_broadcast_first(v);
  y[8 * n + i] = simd_prefix_exclusive_sum(v);
  y[9 * n + i] = simd_prefix_inclusive_sum(v);
  y[10 * n + i] = simd_sum(float2(v, 2.0f * v)).y;
  z[i] = simd_sum(int(i)) + simd_any(v > 1.0f) * 100000 + simd_all(v > -10.0f) * 1000000;
}
"""


@pytest.mark.parametrize("order", emulator.ORDERS)
def test_functions_across_a_simdgroup(order: str):
    n, lane = 96, torch.arange(96) % 32
    x = torch.randint(-9, 9, (n,), generator=torch.Generator().manual_seed(0)).float()
    y, z, groups = torch.empty(11, n), torch.empty(n, dtype=torch.int32), x.view(-1, 32)

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(32)

    def taken(lanes: Tensor) -> Tensor:
        return groups.gather(1, lanes.view(-1, 32)).flatten()

    with settings(order=order):
        compile_shader(HEAD + SIMD).simd(x, y, z)
    sources = (31 - lane, lane ^ 5, torch.where(lane >= 3, lane - 3, lane), torch.where(lane < 29, lane + 3, lane), lane * 0 + 7, lane * 0)
    sums = groups.cumsum(1).flatten()
    expected = [each(groups.amax(1)), each(groups.amin(1)), *map(taken, sources), sums - x, sums, each(2 * groups.sum(1))]
    assert torch.equal(y, torch.stack(expected))
    total = torch.arange(n).view(-1, 32).sum(1) + (groups > 1).any(1) * 100000 + (groups > -10).all(1) * 1000000
    assert torch.equal(z.long(), each(total))


MATRICES = HEAD + """
#include <metal_simdgroup_matrix>
kernel void product(device const half* a, device const bfloat* b, device float* y, device float* diagonal) {
  threadgroup float tile[8 * 12];
  simdgroup_half8x8 left;
  simdgroup_bfloat8x8 right;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  for (int k = 0; k < 24; k += 8) {
    simdgroup_load(left, a, 24, ulong2(k, 8));
    simdgroup_load(right, b + k, 24, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
  }
  simdgroup_store(sum, tile, 12, ulong2(4, 0));
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(sum, tile + 4, 12);
  simdgroup_store(sum, y, 8, ulong2(0, 0), true);
  simdgroup_multiply(sum, left, right);
  simdgroup_store(sum, y + 64);
  simdgroup_store(simdgroup_float8x8(3.0f), diagonal);
}
"""


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("layout", emulator.MATRIX_LAYOUTS)
def test_matrix_functions(layout: str, checked: bool):
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (16, 24), generator=generator).half()
    b = torch.randint(-8, 9, (8, 24), generator=generator).bfloat16()
    y, diagonal = torch.empty(2, 8, 8), torch.empty(8, 8)
    with settings(matrix_layout=layout, checked=checked):
        compile_shader(MATRICES).product(a, b, y, diagonal, threads=32)
    left, right = a[8:].float(), b.float()
    assert torch.equal(y[0].T, left @ right.T + 1) and torch.equal(y[1], left[:, 16:] @ right[:, 16:].T)
    assert torch.equal(diagonal, 3 * torch.eye(8))


# ---- sources ----


@pytest.mark.parametrize(
    "source, message",
    [
        ("kernel void k(device float* x) { threadgroup float* p = x; }", "cannot initialize a variable of type '.*float \\*'"),
        ("kernel void k(device float* x) {\n  float a = 0.0f;\n  float* p = &a;\n}", "line 5: a pointer without an address space"),
        ("void f(device float* x) { } kernel void k() { threadgroup float a[4]; f(a); }", "no matching function for call to 'f'"),
        ("kernel void k(constant float& x) { x = 1.0f; }", "read-only|const"),
        ("kernel void k(device float* x) { x[0] = float4(1.0f, 2.0f).x; }", "wrong number of elements in a vector constructor"),
        ("kernel void k(float2 i [[thread_position_in_grid]]) { }", "is ushort, uint or a vector of them"),
        ("kernel void k(device float* x) { x[0] = 1; } // \u00d7", "line 3: torch.mps takes ASCII only"),
        ("\nkernel void k(device float* x [[bufer(0)]]) { }", r"line 4: unknown attribute bufer, did you mean buffer"),
        ("kernel void k(threadgroup float* x [[threadgroup(0)]]) { }", "cannot be set through torch.mps"),
        ("kernel void k(device float* x [[buffer(1)]], device float* y [[buffer(1)]]) { }", "buffer index 1 is used twice"),
        ("void f() {\n  threadgroup float a[4];\n}", "line 4: threadgroup variables are declared in kernel functions only"),
        ("kernel void k(device float* x) {\n  threadgroup float a = 0.0f;\n}", "line 4: threadgroup declaration not understood"),
        ('template [[host_name("k")]] [[kernel]] decltype(f<1>) f<1>;', 'instantiation "k" names no kernel template'),
        ("kernel void k(device float* x) { x[0] = undefined; }", "program_source:3:.*undeclared identifier 'undefined'"),
        ("#error not today", "not today"),
    ],
)
def test_sources_that_are_refused(source: str, message: str):
    with pytest.raises(SyntaxError, match=message):
        compile_shader(HEAD + source)


def test_macros_conditions_and_templates_make_kernels():
    source = """
#define INSTANTIATE(name, n) template [[host_name("times_" #name)]] [[kernel]] decltype(times<n>) times<n>;
template <int N>
[[kernel]] void times(device float* x, uint i [[thread_position_in_grid]]) {
  threadgroup float tile[N * 32]; // comment; threadgroup float fake[1];
  threadgroup float* own = tile + i * N;
  for (int j = 0; j < N; ++j) own[j] = x[i];
  for (int j = 1; j < N; ++j) x[i] += own[j];
}
INSTANTIATE(two, 2)
INSTANTIATE(three, 3)
#if __METAL_VERSION__ >= 400
kernel void new_only(device float* x) { x[0] = 4.0f; }
#endif
"""
    old, new, x = compile_shader(HEAD + source, metal_version=310), compile_shader(HEAD + source), torch.ones(32)
    assert set(dir(old)) == {"times_two", "times_three"} and set(dir(new)) - set(dir(old)) == {"new_only"}
    assert (old.times_two.static_thread_group_memory_length, old.times_three.static_thread_group_memory_length) == (256, 384)
    old.times_two(x)
    old.times_three(x)
    assert (x == 6).all()


def test_errors_name_the_line_of_the_source_behind_macros():
    macro = "#define TWO_LINES \\\n  int a = 0;\n"
    kernel = "kernel void k(device int* x) {\n  TWO_LINES\n  x[0] = a + x[7];\n  int local[2] = {0, 0};\n  x[0] = local[x[0]];\n}\n"
    with settings(checked=True):
        library = compile_shader(HEAD + macro + kernel)
        with pytest.raises(MetalError, match=r"array index out of bounds \(line 9\)"):
            library.k(torch.full((8,), 5, dtype=torch.int32), threads=1)


def test_a_library_follows_the_settings_of_the_call(library: ShaderLibrary):
    source = HEAD + "kernel void k(device float* y) { threadgroup float a[1]; y[0] = a[0]; }"
    library, y = compile_shader(source), torch.zeros(1)
    with settings(poison=0):
        library.k(y)
    assert y == 0
    with settings(checked=True), pytest.raises(MetalError, match="a read of what nobody wrote"):
        library.k(y)
    library.k(y)
    assert y.isnan()


def test_what_was_compiled_is_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "BUILD", tmp_path)
    compile_shader(HEAD + FULL)
    first = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    monkeypatch.setattr(toolchain.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    x = torch.zeros(4)
    compile_shader(HEAD + FULL).full(x, 1.0)
    assert x.sum() == 4 and first == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "body, message",
    [
        ("int big[100000]; for (int i = 0; i < 100000; ++i) big[i] = x[0]; x[1] = big[x[2]];", "stack overflow of a thread"),
        ("device int* nowhere = nullptr; x[1] = nowhere[x[0]];", "access to an address outside all buffers"),
        ("x[1] = x[x[2] - 100000];", "out-of-bounds access, .* before argument 0"),
    ],
)
def test_crashes_become_errors_and_the_next_call_works(library: ShaderLibrary, body: str, message: str):
    x = torch.tensor([0, 7, 3], dtype=torch.int32)
    with pytest.raises(MetalError, match=message):
        compile_shader(HEAD + f"kernel void k(device int* x) {{ {body} }}").k(x, threads=1)
    assert x.tolist() == [0, 7, 3]
    library.add_one(y := torch.zeros(4))
    assert (y == 1).all()
