"""torch.mps.compile_shader on the CPU: the same interface, on CPU tensors. README.md says what that shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tests.metal import source as msl
from tests.metal import toolchain
from tests.metal.lint import lint

ORDERS = ("forward", "reverse", "shuffled")
SIMD_SUMS = ("butterfly", "adjacent", "forward", "reverse")
MATRIX_LAYOUTS = ("blocks", "rows")
PRODUCT_ORDERS = ("forward", "reverse")
COOPERATIVE_LAYOUTS = ("blocks", "runs", "strided", "dead_slots", "transposed")

MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32 * 1024
MAX_CONSTANT_BYTES = 4096
CASTS = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
}  # fmt: skip
ELEMENTS = {"f": "float", "b": "bfloat", "i": "integer", "s": "struct"}


class MetalError(RuntimeError):
    """A kernel did what Metal forbids or leaves undefined, or was called with arguments that do not fit it."""


@dataclass(frozen=True)
class Settings:
    """Which GPU is emulated, of all that a kernel must be right on."""

    checked: bool = False  # the slower build that watches every access
    order: str = "forward"  # in which lanes run between the points where they meet
    seed: int = 0  # of the shuffled order
    simd_sum: str = "butterfly"  # the tree of additions
    matrix_layout: str = "blocks"  # which two elements of a simdgroup_matrix a lane holds
    product_order: str = "forward"  # of the reduction in matrix products
    cooperative_layout: str = "blocks"  # which elements of a cooperative tensor a thread holds
    max_threads: int = MAX_THREADS  # per threadgroup: what a kernel with many registers would report
    poison: int = 0xFF  # the byte that threadgroup memory holds at the start: NaN for floats, -1 for integers

    def behaviour(self) -> tuple[int, int, int, int]:
        return (
            SIMD_SUMS.index(self.simd_sum),
            MATRIX_LAYOUTS.index(self.matrix_layout),
            PRODUCT_ORDERS.index(self.product_order),
            COOPERATIVE_LAYOUTS.index(self.cooperative_layout),
        )


_settings: ContextVar[Settings] = ContextVar("metal emulator settings", default=Settings())


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Changes the settings of all calls within, also of libraries compiled before."""
    token = _settings.set(replace(_settings.get(), **changes))
    try:
        yield _settings.get()
    finally:
        _settings.reset(token)


@dataclass(frozen=True)
class Argument:
    """A parameter of a kernel that is bound to a buffer."""

    index: int
    elements: int  # of a reference; 0 for a pointer
    element_size: int
    element: str  # of ELEMENTS
    is_const: bool


class Kernel:
    """A kernel function, callable as in torch.mps."""

    thread_execution_width = 32

    def __init__(self, library: ShaderLibrary, index: int) -> None:
        self._library, self._index, self._kernel = library, index, library.kernels[index]

    @property
    def max_threads_per_threadgroup(self) -> int:
        return min(_settings.get().max_threads, self._library.build.max_threads(self._index) or MAX_THREADS)

    @property
    def static_thread_group_memory_length(self) -> int:
        return self._library.build.threadgroup_bytes(self._index)

    @cached_property
    def _arguments(self) -> dict[int, Argument]:
        parameters = self._kernel.function.parameters
        types = self._library.build.parameters(self._index, len(parameters))
        return {p.buffer: Argument(p.buffer, *t) for p, t in zip(parameters, types, strict=True) if p.source == msl.BUFFER}

    def __call__(self, *args: Any, threads: Any = None, group_size: Any = None, arg_casts: Any = None) -> None:
        tensors = [a if isinstance(a, Tensor) else constant(a, cast_of(arg_casts, i)) for i, a in enumerate(args)]
        if threads is None:
            threads = next((a.numel() for a in args if isinstance(a, Tensor)), None)
        grid, group = self._grid(threads, group_size)
        self._check_arguments(args, tensors)
        buffers, bindings = self._bind(args, tensors)
        now = _settings.get()
        try:
            self._library.build.dispatch(
                self._index, buffers, bindings, grid, group, now.checked, ORDERS.index(now.order), now.seed, now.poison, now.behaviour()
            )
        except RuntimeError as e:
            raise MetalError(f"{self._kernel.name}: {e}") from None

    def _bind(self, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[list[tuple[str, int, int, bool]], list[tuple[int, int]]]:
        """A buffer per storage, since tensors may share one, and where each argument lies in them."""
        buffers: dict[int | str, tuple[str, int, int, bool]] = {}
        bindings = []
        for i, tensor in enumerate(tensors):
            storage, argument = tensor.untyped_storage(), self._arguments.get(i)
            key, name, size = storage.data_ptr(), f"argument {i}", storage.nbytes()
            offset = tensor.storage_offset() * tensor.element_size()
            problem = mismatch(tensor, argument, is_scalar=not isinstance(args[i], Tensor)) if argument else None
            if problem:  # fails when it is used: a buffer that is not, may be anything
                key, name, size, offset = f"unusable {i}", f"{name}, which is {problem}", 0, 0
            writable = argument is not None and not argument.is_const
            if key in buffers:
                name, writable = f"{buffers[key][0]}, {i}", writable or buffers[key][3]
            buffers[key] = (name, storage.data_ptr(), size, writable)
            bindings.append((list(buffers).index(key), offset))
        return list(buffers.values()), bindings

    def _grid(self, threads: Any, group_size: Any) -> tuple[list[int], list[int]]:
        if threads is None:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        grid = [threads] if isinstance(threads, int) else list(threads)
        limit = self.max_threads_per_threadgroup
        if group_size is None:
            group = [min(grid[0], limit)] if len(grid) == 1 else [limit] + [1] * (len(grid) - 1)
        else:
            group = [group_size] if isinstance(group_size, int) else list(group_size)
        if not 1 <= len(grid) <= 3 or len(group) != len(grid):
            raise RuntimeError(f"threads and group_size have 1 to 3 dimensions, the same number: got {grid} and {group}")
        size = 1
        for g in group:
            size *= g
        if size > limit:
            raise ValueError(f"Threadgroup size exceeds {limit} limit")
        if min(*grid, *group) < 1 or max(grid) >= 2**32:
            raise MetalError(f"{self._kernel.name}: nothing to dispatch: threads {grid}, group_size {group}")
        return (grid + [1, 1])[:3], (group + [1, 1])[:3]

    def _check_arguments(self, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        name = self._kernel.name
        if len(args) > msl.MAX_BUFFERS:
            raise MetalError(f"{name}: {len(args)} arguments, the limit is {msl.MAX_BUFFERS}")
        for index, argument in self._arguments.items():
            if index >= len(args):
                raise MetalError(f"{name}: buffer {index} is not set")
            tensor, given = tensors[index], args[index]
            if isinstance(given, Tensor) and given.device.type != "cpu":
                raise MetalError(f"{name}: argument {index} is on {given.device}, the emulator takes CPU tensors")
            needed = argument.elements * argument.element_size
            if tensor.nbytes < needed:
                raise MetalError(f"{name}: argument {index} has {tensor.nbytes} bytes, the kernel reads {needed}")


def cast_of(arg_casts: Any, index: int) -> str:
    if arg_casts is None or isinstance(arg_casts, str):
        return arg_casts or ""
    if not isinstance(arg_casts, dict):
        raise RuntimeError(f"Unexpected caster arg type {type(arg_casts).__name__}")
    return arg_casts.get(index, "")


def constant(value: Any, cast: str) -> Tensor:
    """The bytes that torch sets for a number, or for a list of them: int64 and float32 unless cast."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not values:
        raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
    if not all(isinstance(v, (int, float)) for v in values):
        raise RuntimeError("Unsupported argument type")
    if cast and cast not in CASTS:
        raise RuntimeError(f"Unsupported cast instruction {cast}")
    is_int = isinstance(values[0], int)
    if is_int and not all(isinstance(v, int) for v in values):
        raise RuntimeError("Unexpected argument types")
    tensor = torch.tensor(values, dtype=torch.int64 if is_int else torch.float32)
    if cast:
        tensor = tensor.to(CASTS[cast])
    if tensor.nbytes > MAX_CONSTANT_BYTES:
        raise MetalError(f"a list of {tensor.nbytes} bytes, the limit is {MAX_CONSTANT_BYTES}")
    return tensor


def mismatch(tensor: Tensor, argument: Argument, *, is_scalar: bool) -> str | None:
    """Why the kernel would misread the tensor, or None. Bytes and structs may view anything, and packed words small elements."""
    size, dtype = tensor.element_size(), tensor.dtype
    given = f"{dtype} and read as {argument.element_size}-byte {ELEMENTS[argument.element]}"
    if argument.element == "s" or argument.element_size == 1:
        return None
    if is_scalar and argument.element == "i" and not dtype.is_floating_point:
        return None  # the low bytes come first
    if size == 1 and not is_scalar:
        return None
    wanted = {"f": argument.element_size == size and dtype.is_floating_point and dtype != torch.bfloat16, "b": dtype == torch.bfloat16}
    fits = wanted.get(argument.element, not dtype.is_floating_point and size <= argument.element_size)
    return None if fits else given


def compile_failure(error: object) -> SyntaxError:
    return SyntaxError(f"Failed to compile\n{error}")


class ShaderLibrary:
    """A compiled source; its attributes are the kernels."""

    def __init__(self, source: str, metal_version: int) -> None:
        msl.require_ascii(source)
        try:
            text = toolchain.preprocess(source, metal_version)
        except toolchain.CompileError as e:
            raise compile_failure(e) from None
        if findings := lint(text, metal_version):
            raise compile_failure("\n".join(map(str, findings)))
        code, self.kernels = msl.translate(text)
        self._metal_version = metal_version
        head = '#include "msl/entry.h"\n#ifdef MSL_CHECKED\n#include "msl/checks.h"\n#endif\n'
        self._code = head + code + msl.entry_points(self.kernels)
        self._builds: dict[bool, Any] = {}
        self._by_name = {k.name: Kernel(self, i) for i, k in enumerate(self.kernels)}
        self.build  # so that a source that does not compile is refused here

    @property
    def build(self) -> Any:
        """The loaded library, compiled for the settings of this moment."""
        checked = _settings.get().checked
        if checked not in self._builds:
            try:
                path = toolchain.compile_shader(self._code, metal_version=self._metal_version, checked=checked)
            except toolchain.CompileError as e:
                raise compile_failure(e) from None
            self._builds[checked] = toolchain.runtime().Library(str(path), len(self.kernels))
        return self._builds[checked]

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._by_name:
            raise RuntimeError(f"Failed to create function state object for: {name}")
        kernel = self._by_name[name]
        used = kernel.static_thread_group_memory_length
        if used > MAX_THREADGROUP_BYTES:
            limit = f"the limit of {MAX_THREADGROUP_BYTES}"
            raise RuntimeError(f"Failed to create pipeline state for {name}: {used} bytes of threadgroup memory exceed {limit}")
        return kernel

    def __dir__(self) -> list[str]:
        return list(self._by_name)


def compile_shader(source: str, *, metal_version: int = 400) -> ShaderLibrary:
    """As torch.mps.compile_shader; SyntaxError if the source does not compile. 400 is macOS 26, 320 and 310 the systems before."""
    return ShaderLibrary(source, metal_version)
