"""The Metal backend: operators of the ``mps`` device, over kernels that torch compiles at run time, so that no Xcode is needed.

The sources are csrc/*/*.metal. A source is compiled once per device and set of element types and constants, which this module
defines ahead of it. Arguments are checked by the C++ checks that all backends share (``torch.ops.mori._<op>_check``).

Strides do not reach a kernel by themselves: q, k, v, their scales and the gate are read where they lie, by strides passed as
numbers, if their last dimension is dense and their rows start on a vector; everything else is made contiguous first.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mori_ops.routes import Route

_ops = torch.ops.mori
_PACKAGED = Path(__file__).parent / "metal"  # in a wheel; a checkout has csrc/
SOURCES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "csrc"
METAL_TYPES = {
    torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat", torch.int8: "char", torch.int32: "int", torch.int64: "long",
}  # fmt: skip
SIMD = 32  # lanes of a simdgroup


# --- compiling --------------------------------------------------------------------------------------------------------


def compile_shader(source: str) -> Any:
    """The one way to Metal; the tests put their emulator here."""
    return torch.mps.compile_shader(source)


def generation_of(name: str) -> int:
    """5 for an "Apple M5 Max", 0 if the name says nothing."""
    named = re.match(r"Apple M(\d+)", name)
    return int(named[1]) if named else 0


def version_of(text: str) -> tuple[int, ...]:
    version = tuple(int(part) for part in text.split(".") if part)
    return (26, *version[1:]) if version[:1] == (16,) else version  # what macOS 26 tells a Python built for older ones


@functools.cache
def gpu_generation() -> int:
    return generation_of(torch.backends.mps.get_name())


@functools.cache
def macos_version() -> tuple[int, ...]:
    return version_of(platform.mac_ver()[0])


def source(name: str, defined: tuple[tuple[str, Any], ...]) -> str:
    """A Metal source as one string: the system's headers, the definitions (which those must not see), the file with its own
    headers in place."""
    text = _with_headers(SOURCES / name)
    system = re.findall(r"^#include <.*>\n", text, re.MULTILINE)
    return "".join(system) + "".join(f"#define {key} {value}\n" for key, value in defined) + re.sub(r"^#include <.*>\n", "", text, flags=re.MULTILINE)


def _with_headers(path: Path) -> str:
    return re.sub(r'^#include "(.*)"$', lambda match: _with_headers(path.parent / match[1]), path.read_text("ascii"), flags=re.MULTILINE)


@functools.cache
def library(device: torch.device, name: str, defined: tuple[tuple[str, Any], ...]) -> Any:
    return compile_shader(source(name, defined))


def _types(**dtypes: torch.dtype) -> dict[str, str]:
    """X=float16 to X: half, X4: half4."""
    names = {name: METAL_TYPES[dtype] for name, dtype in dtypes.items()}
    return names | {f"{name}4": f"{metal}4" for name, metal in names.items()}


def _launch(name: str, kernel: str, defined: dict[str, Any], arguments: tuple, grid: tuple[int, ...], group: tuple[int, ...]) -> None:
    """`grid`: threadgroups, `group`: threads of one, per dimension; the first argument's device is the kernel's."""
    function = getattr(library(arguments[0].device, name, tuple(defined.items())), kernel)
    threads = 1
    for size in group:
        threads *= size
    if threads > function.max_threads_per_threadgroup:
        raise RuntimeError(f"mori_ops: {kernel} needs {threads} threads per threadgroup, this device allows {function.max_threads_per_threadgroup}")
    function(*arguments, threads=tuple(g * t for g, t in zip(grid, group, strict=True)), group_size=group)


# --- tensors ----------------------------------------------------------------------------------------------------------

VECTOR = 4  # elements of a vector load


def _aligned(t: Tensor, elements: int = VECTOR) -> bool:
    return t.storage_offset() % elements == 0


def _dense(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t if _aligned(t) else t.clone()


def _rows(t: Tensor, elements: int = VECTOR) -> Tensor:
    """`t` itself if its last dimension is dense and each row starts on a vector of `elements`; else a copy like that."""
    strides = [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]
    dense = t.shape[-1] == 1 or t.stride(-1) == 1
    outer = strides[:-1] if t.shape[-1] > 1 else strides
    return t if dense and _aligned(t, elements) and all(s % elements == 0 for s in outer) else _dense(t)


@functools.cache
def _unread(device: torch.device, dtype: torch.dtype) -> Tensor:
    """For a parameter that the kernel as defined does not touch: Metal wants a buffer all the same."""
    return torch.zeros(1, 1, 1, dtype=dtype, device=device)


# --- routes -----------------------------------------------------------------------------------------------------------


def tensor_units() -> bool:
    """Whether the device has matrix units for Metal 4's cooperative tensors, and a system that lets kernels fill their inputs."""
    return gpu_generation() >= 5 and macos_version() >= (26, 2)


@dataclass(frozen=True)
class Rule:
    """The first rule of a table that takes the dimensions wins; their names are those of mori_ops.route()."""

    kernel: str
    takes: Callable[[dict[str, int]], bool]
    why: str


_M5 = "Apple M5, macOS 26, public report on 324 x 10240"
ROUTES: dict[str, tuple[Rule, ...]] = {
    "qsa_flash": (
        Rule("tensor", lambda d: tensor_units(), "M5 or later, macOS 26.2 or later: cooperative tensors, after a self-check"),
        Rule("simdgroup", lambda d: True, "simdgroup matrices: any Apple GPU since M1"),
    ),
    "gr_down": (
        Rule("4_4_r2", lambda d: d["ntok"] >= 4 and gpu_generation() >= 5, f"two rows per simdgroup from 4 tokens on M5: -2.5% ({_M5})"),
        Rule("4_4_r2", lambda d: d["ntok"] >= 5, f"two rows per simdgroup from 5 tokens: -11% at 5, -33% at 8 ({_M5})"),
        Rule("4_4", lambda d: True, f"one row per simdgroup for few tokens: two cost 4% at 3 ({_M5})"),
    ),
    "gr_down_8": (
        Rule("8_8_r2", lambda d: d["ntok"] >= 5, f"two rows per simdgroup from 5 tokens: 46.7 against 45.5 us at 4 ({_M5})"),
        Rule("8_8", lambda d: True, "one row per simdgroup for few tokens"),
    ),
}


def route(table: str, **dims: int) -> Route:
    rule = next(rule for rule in ROUTES[table] if rule.takes(dims))
    return Route(rule.kernel, rule.why)


# --- attention over selected cells ------------------------------------------------------------------------------------

TILE_ROWS = (8, 16)  # query heads of a threadgroup


def attend(q, k, v, ids, k_scale, v_scale, gate, sm_scale, out, lse, splits, *, kernel: str, hoisted: bool = True) -> None:
    """qsa_flash (`lse` None) or qsa_attn by the named kernel, arguments checked. `hoisted` False: the form with a branch per
    element, which tests and bench/compare.py hold against the other."""
    tokens, q_heads, dim = q.shape
    cells, kv_heads = k.shape[:2]
    slots = ids.shape[1]
    if q.numel() == 0 or cells == 0 or slots == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    if cells > 2**31 - 1:
        raise ValueError(f"qsa_flash: k must hold fewer than 2^31 cells, got {cells}")
    if os.environ.get("MORI_CHECK_IDS") and int(ids.max()) >= cells:
        raise IndexError(f"qsa_flash: ids holds {int(ids.max())}, but k holds {cells} cells (raised because MORI_CHECK_IDS is set)")
    operand = torch.bfloat16 if k.dtype == torch.bfloat16 else torch.float16
    gate_in = q if gate is None else gate
    group = q_heads // kv_heads
    rows = TILE_ROWS[-1] if kernel == "tensor" or group > TILE_ROWS[0] else TILE_ROWS[0]
    tiles = -(-group // rows)
    defined = _types(Query=q.dtype, Cell=k.dtype, Id=ids.dtype, Gate=gate_in.dtype, Out=out.dtype, Operand=operand)
    defined |= {"DIM": dim, "INT8": int(k_scale is not None), "GATED": int(gate is not None), "SPLIT": int(lse is not None), "HOISTED": int(hoisted)}
    if kernel == "simdgroup":
        defined["ROWS"] = rows
    simdgroups = dim // 64 if kernel == "tensor" else 4
    q, k, v, gate_in, ids = _rows(q), _rows(k), _rows(v), _rows(gate_in), ids.contiguous()
    k_scale, v_scale = (_unread(q.device, torch.float16) if s is None else _rows(s, 1) for s in (k_scale, v_scale))
    shape = [tokens, slots, cells, q_heads, group, tiles, -(-slots // splits)]
    shape += [stride for t in (q, k, k_scale, v, v_scale, gate_in) for stride in t.stride()[:2]]
    target = out if _aligned(out) else torch.empty_like(out)
    logs = _unread(q.device, torch.float32) if lse is None else lse
    arguments = (q, k, k_scale, v, v_scale, ids, gate_in, target, logs, shape, (dim**-0.5) if sm_scale is None else sm_scale)
    name, function = {"simdgroup": ("qsa/qsa_flash.metal", "qsa_flash"), "tensor": ("qsa/qsa_flash_tensor.metal", "qsa_flash_tensor")}[kernel]
    _launch(name, function, defined, arguments, (tokens, kv_heads * tiles, splits), (SIMD * simdgroups, 1, 1))
    if target is not out:
        out.copy_(target)


def _usable(kernel: str, q: Tensor, k: Tensor) -> str:
    """`kernel`, or the one that always works where the tensor units' does not."""
    return kernel if kernel != "tensor" or _tensor_kernel_works(q.device, q.shape[2], k.dtype) else "simdgroup"


@functools.cache
def _tensor_kernel_works(device: torch.device, dim: int, cell: torch.dtype) -> bool:
    """Compiles the cooperative-tensor kernel and holds it against the other one, once per element type and head size: on some
    systems its compilation fails inside Apple's own headers."""
    steps = torch.arange(1, 70 * dim + 1, device=device, dtype=torch.float32)
    q = torch.sin(steps[: 2 * 12 * dim]).view(2, 12, dim).half()
    kv = torch.cos(steps * 1.7).view(70, 1, dim)
    cells = [(kv * 100).to(cell), (kv.flip(0) * 100).to(cell)]
    scales = [torch.full((70, 1, dim // 64), 0.01, device=device).half()] * 2 if cell == torch.int8 else [None, None]
    ids = torch.arange(150, device=device, dtype=torch.int32).view(2, 75) % 71 - 1
    results = []
    try:
        for kernel in ("simdgroup", "tensor"):
            results.append(torch.full(q.shape, torch.nan, device=device))
            attend(q, *cells, ids, *scales, None, 0.1, results[-1], None, 1, kernel=kernel)
        error = ((results[1] - results[0]).norm() / results[0].norm()).item()
        problem = None if error < 1e-2 else f"its result differs by {error:.1e}"
    except Exception as refusal:  # whatever the system's compiler says
        problem = f"{type(refusal).__name__}: {refusal}"
    if problem:
        _warn_of_fallback(problem)
    return problem is None


def _warn_of_fallback(problem: str) -> None:
    if not _warned:
        _warned.append(problem)
        warnings.warn(f"mori_ops: the cooperative-tensor attention kernel is not used on this system, the simdgroup one is: {problem}", stacklevel=2)


_warned: list[str] = []


def _flash_kernel(q: Tensor, k: Tensor, ids: Tensor) -> str:
    dims = dict(t=q.shape[0], s=ids.shape[1], cells=k.shape[0], hq=q.shape[1], hkv=k.shape[1], d=q.shape[2])
    return _usable(route("qsa_flash", **dims).kernel, q, k)


def qsa_flash(q, k, v, ids, *, k_scale=None, v_scale=None, gate=None, sm_scale=None, out_dtype=None):
    _ops._qsa_flash_check(q, k, v, ids, k_scale, v_scale, gate, sm_scale, out_dtype, None)
    out = q.new_empty(q.shape, dtype=out_dtype or q.dtype)
    attend(q, k, v, ids, k_scale, v_scale, gate, sm_scale, out, None, 1, kernel=_flash_kernel(q, k, ids))
    return out


def qsa_flash_out(q, k, v, ids, *, k_scale=None, v_scale=None, gate=None, sm_scale=None, out):
    _ops._qsa_flash_check(q, k, v, ids, k_scale, v_scale, gate, sm_scale, None, out)
    attend(q, k, v, ids, k_scale, v_scale, gate, sm_scale, out, None, 1, kernel=_flash_kernel(q, k, ids))


def qsa_attn(q, k, v, ids, *, k_scale=None, v_scale=None, sm_scale=None, splits=4):
    _ops._qsa_attn_check(q, k, v, ids, k_scale, v_scale, sm_scale, splits, None, None)
    partial = q.new_empty((splits, *q.shape), dtype=torch.float32)
    lse = q.new_empty((splits, *q.shape[:2]), dtype=torch.float32)
    attend(q, k, v, ids, k_scale, v_scale, None, sm_scale, partial, lse, splits, kernel=_flash_kernel(q, k, ids))
    return partial, lse


def qsa_attn_out(q, k, v, ids, *, k_scale=None, v_scale=None, sm_scale=None, partial, lse):
    _ops._qsa_attn_check(q, k, v, ids, k_scale, v_scale, sm_scale, 1, partial, lse)
    attend(q, k, v, ids, k_scale, v_scale, None, sm_scale, partial, lse, partial.shape[0], kernel=_flash_kernel(q, k, ids))


def _run_merge(partial: Tensor, lse: Tensor, gate: Tensor | None, out: Tensor) -> None:
    if out.numel() == 0:
        return
    splits, tokens, heads, dim = partial.shape
    partial, lse = _dense(partial), _dense(lse)
    gate_in = partial[0] if gate is None else _rows(gate, 1)
    shape = [splits, tokens * heads, dim, heads, *gate_in.stride()[:2]]
    defined = _types(Gate=gate_in.dtype, Out=out.dtype) | {"GATED": int(gate is not None)}
    _launch("qsa/qsa_merge.metal", "qsa_merge", defined, (partial, lse, gate_in, out, shape), (-(-dim // SIMD), tokens * heads), (SIMD, 1))


def qsa_merge(partial, lse, *, gate=None, out_dtype=None):
    _ops._qsa_merge_check(partial, lse, gate, out_dtype, None)
    out = partial.new_empty(partial.shape[1:], dtype=out_dtype or torch.float32)
    _run_merge(partial, lse, gate, out)
    return out


def qsa_merge_out(partial, lse, *, gate=None, out):
    _ops._qsa_merge_check(partial, lse, gate, None, out)
    _run_merge(partial, lse, gate, out)


def _run_kv_quantize(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    if x.numel():
        _launch("qsa/kv_quantize.metal", "kv_quantize", _types(X=x.dtype), (_dense(x), codes, scale), (1, x.numel() // 64), (SIMD, 1))


def kv_quantize(x):
    _ops._kv_quantize_check(x, None, None)
    codes, scale = x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], x.shape[-1] // 64), dtype=torch.float16)
    _run_kv_quantize(x, codes, scale)
    return codes, scale


def kv_quantize_out(x, *, codes, scale):
    _ops._kv_quantize_check(x, codes, scale)
    _run_kv_quantize(x, codes, scale)


# --- Q8_0 -------------------------------------------------------------------------------------------------------------

BLOCK, BLOCK_BYTES = 32, 34
WINDOW = 8  # most tokens of one gr_down kernel


def _run_q8_0(kernel: str, source_tensor: Tensor, out: Tensor, floats: Tensor) -> None:
    """`floats`: the side that is not bytes."""
    blocks = floats.numel() // BLOCK
    if blocks:
        target = out if out.dtype != torch.uint8 or _aligned(out, 2) else torch.empty_like(out)
        _launch("gr/q8_0.metal", kernel, _types(X=floats.dtype), (_dense(source_tensor), target), (1, blocks), (SIMD, 1))
        if target is not out:
            out.copy_(target)


def q8_0_quantize(w):
    _ops._q8_0_quantize_check(w, None)
    out = w.new_empty((w.shape[0], w.shape[1] // BLOCK * BLOCK_BYTES), dtype=torch.uint8)
    _run_q8_0("q8_0_quantize", w, out, w)
    return out


def q8_0_quantize_out(w, *, out):
    _ops._q8_0_quantize_check(w, out)
    _run_q8_0("q8_0_quantize", w, out, w)


def q8_0_dequantize(w, *, out_dtype=None):
    _ops._q8_0_dequantize_check(w, out_dtype, None)
    out = w.new_empty((w.shape[0], w.shape[1] // BLOCK_BYTES * BLOCK), dtype=out_dtype or torch.float32)
    _run_q8_0("q8_0_dequantize", w, out, out)
    return out


def q8_0_dequantize_out(w, *, out):
    _ops._q8_0_dequantize_check(w, None, out)
    _run_q8_0("q8_0_dequantize", w, out, out)


def project(x: Tensor, w: Tensor, norm: Tensor | None, eps: float, hc: int, member: str, out: Tensor, *, rolled: bool | None = None) -> None:
    """gr_down by a member of the family, "<simdgroups>_<KS>[_r<rows>]", arguments checked. The members that lost in the public
    report ("8_4_r2", "4_4_r4", ..) work too, for bench/compare.py; `rolled` overrides where the token loop is rolled."""
    if out.numel() == 0 or w.shape[1] == 0:
        out.zero_()
        return
    simdgroups, ks, rows = (int(part or 1) for part in re.fullmatch(r"(\d+)_(\d+)(?:_r(\d+))?", member).groups())
    ntok, n, units = x.shape[0], w.shape[0], w.shape[1] // BLOCK_BYTES
    x, w = _dense(x), _dense(w)
    if norm is not None:
        norm = _dense(norm)
        if ks % hc or units % ks:  # groups that the runs of the simdgroups do not respect
            x, norm = _normalised(x, norm, eps, hc, units), None
    weight = x if norm is None else norm
    defined = _types(X=x.dtype, Norm=weight.dtype) | {"NORM": int(norm is not None), "KS": ks, "SIMDGROUPS": simdgroups, "ROWS": rows}
    defined["ROLLED"] = int((ks == 4 and rows == 2) if rolled is None else rolled)
    groups = -(-n // (rows * simdgroups // ks))
    whole = ntok // WINDOW * WINDOW
    for first, tokens, blocks in ((0, WINDOW, ntok // WINDOW), (whole, ntok - whole, 1)):
        if tokens and blocks:
            arguments = (w, x[first:], weight, out[first:], [n, units, hc], eps)
            _launch("gr/gr_down.metal", f"gr_down_{tokens}", defined, arguments, (groups, blocks), (SIMD * simdgroups, 1))


def _normalised(x: Tensor, norm: Tensor, eps: float, hc: int, units: int) -> Tensor:
    xn = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    defined = _types(X=x.dtype, Norm=norm.dtype)
    _launch("gr/gr_norm.metal", "gr_norm", defined, (x, norm, xn, [units * BLOCK, hc], eps), (hc, x.shape[0]), (SIMD, 1))
    return xn


def _run_down(x, w, norm_weight, eps, hc, variant, out) -> None:
    table = {"auto": "gr_down", "auto_8": "gr_down_8"}.get(variant)
    member = variant if table is None else route(table, ntok=x.shape[0], n=w.shape[0], k=x.shape[1]).kernel
    project(x, w, norm_weight, eps, hc, member, out)


def gr_down(x, w, *, norm_weight=None, eps=1e-6, hc=4, variant="auto"):
    _ops._gr_down_check(x, w, norm_weight, eps, hc, variant, None)
    out = x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)
    _run_down(x, w, norm_weight, eps, hc, variant, out)
    return out


def gr_down_out(x, w, *, norm_weight=None, eps=1e-6, hc=4, variant="auto", out):
    _ops._gr_down_check(x, w, norm_weight, eps, hc, variant, out)
    _run_down(x, w, norm_weight, eps, hc, variant, out)


# --- registration -----------------------------------------------------------------------------------------------------

KERNELS: dict[str, Callable] = {
    "kv_quantize": kv_quantize, "kv_quantize.out": kv_quantize_out,
    "qsa_flash": qsa_flash, "qsa_flash.out": qsa_flash_out,
    "qsa_attn": qsa_attn, "qsa_attn.out": qsa_attn_out,
    "qsa_merge": qsa_merge, "qsa_merge.out": qsa_merge_out,
    "q8_0_quantize": q8_0_quantize, "q8_0_quantize.out": q8_0_quantize_out,
    "q8_0_dequantize": q8_0_dequantize, "q8_0_dequantize.out": q8_0_dequantize_out,
    "gr_down": gr_down, "gr_down.out": gr_down_out,
}  # fmt: skip


def register(library: torch.library.Library, key: str = "MPS", **options: Any) -> None:
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, key, **options)
