"""Several ranks of gemm_ar on one interpreter: their workspaces, and the launches that launch_gfx950.cpp makes of a call."""

import struct
from dataclasses import dataclass

import numpy as np

from mori_ops import symmetric

from . import launches
from .assembly import Kernel
from .interpreter import Launch, Machine, Schedule, Statistics
from .launches import FLOATS, only

TIMEOUT = 1 << 40  # ticks: instructions of the whole machine
GROUPS = 4  # workgroups of a collective
TILES = {  # form: (part of the symbol, columns of a tile)
    "packed 256x256": ("Li2ENS_5mxfp812PackedScales", 256),
    "raw 256x256": ("Li2ENS_5mxfp89RawScales", 256),
    "packed 256x128": ("Li1ENS_5mxfp812PackedScales", 128),
    "raw 256x128": ("Li1ENS_5mxfp89RawScales", 128),
}
_SYMBOL = {np.dtype(np.float32): "ff", np.dtype(np.uint16): "DF16bDF16b", np.dtype(np.float16): "fDF16_"}  # partial and output type


@dataclass
class Call:
    """One call: what every rank brings, and the output of each, written in place."""

    parts: list  # mx.Operands of each rank
    outs: list[np.ndarray]
    chunk_rows: int = 64
    span_chunks: int = 1
    form: str = "raw 256x128"  # or "simple raw", "simple ptpc", ...
    bias: np.ndarray | None = None
    fp8_wire: bool = False
    one_shot: bool = False
    timeout: int = TIMEOUT
    absent: tuple[int, ...] = ()  # ranks that do not come

    @property
    def shape(self) -> tuple[int, int]:
        return self.outs[0].shape

    @property
    def partial(self) -> np.dtype:
        return self.outs[0].dtype if self.outs[0].dtype == np.uint16 else np.dtype(np.float32)


class Ranks:
    """`slot_bytes`: room for an owner's rows of one rank's summands."""

    def __init__(self, world: int, slot_bytes: int) -> None:
        self.world, self.machine = world, Machine()
        sums = symmetric.SIGNAL_BYTES + world * slot_bytes
        self.layout = slot_bytes, sums, sums + slot_bytes
        self.workspaces = [np.zeros(sums + slot_bytes + max(64, slot_bytes // 16), np.uint8) for _ in range(world)]
        for workspace in self.workspaces:
            workspace[symmetric.SIGNAL_BYTES :] = 0xFF  # NaN
            self.machine.address(workspace)  # before parts of it
        self.failures = [np.zeros(4, np.uint32) for _ in range(world)]

    def run(
        self,
        calls: list[Call],
        schedule: Schedule,
        *,
        kernels: dict[str, Kernel] | None = None,
        delay: dict[int, int] | None = None,
        pace: dict[int, int] | None = None,
    ) -> list[Statistics]:
        """All calls of all ranks together; a rank's next call starts when it has ended the one before. `kernels` instead of the
        shipped ones: deliver, collective, one_shot. `delay` and `pace` of single ranks."""
        sequences = []
        for rank in range(self.world):
            of_rank: list[Launch] = []
            for call in calls:
                if rank not in call.absent:
                    of_rank += self.launches(call, rank, of_rank[-1] if of_rank else None, kernels or {})
            for launch in of_rank:
                launch.device, launch.pace = rank, (pace or {}).get(rank, 1)
            for launch in of_rank[:2]:
                launch.delay = (delay or {}).get(rank, 0)
            sequences += of_rank
        return self.machine.run(*sequences, schedule=schedule)

    def launches(self, call: Call, rank: int, after: Launch | None, kernels: dict[str, Kernel]) -> list[Launch]:
        """The launches of one rank, the last one of them the collective."""
        (m, n), x = call.shape, call.parts[rank]
        size = call.partial.itemsize
        packed = call.form.startswith("packed")
        scales = (launches.pack_a(x.a_scale), launches.pack_b(x.b_scale)) if packed else (x.a_scale, x.b_scale)
        slot = self.workspaces[rank][symmetric.SIGNAL_BYTES + rank * self.layout[0] :][:size].view(call.partial)
        args = launches.gemm_args(self.machine, x.a, x.b, *scales, None, slot)
        argument = self.argument(call, rank)
        if call.one_shot:
            kernel, columns = launches.gemm_kernel(call.form), launches.GEMM_KERNELS[call.form][1]
            gemm = Launch(kernel, (-(-n // columns), -(-m // 256)), 512, (args,), after=after)
        elif call.form in TILES:
            symbol, columns = TILES[call.form]
            kernel = kernels.get("deliver") or only(launches.kernels("gemm_ar"), f"deliver_tilesI{symbol}")
            gemm = Launch(kernel, (-(-n // columns), self.row_tiles(call, 256)), 512, (args, argument), after=after)
        else:
            symbol, kernel_scales = launches.simple_scales(self.machine, *scales, call.form.split()[1], m, n, x.a.shape[1])
            kernel = only(launches.kernels("gemm_ar"), f"deliver_simpleINS_5mxfp86simple{len(symbol)}{symbol}")
            gemm = Launch(kernel, (-(-n // 64) * self.row_tiles(call, 64),), 256, (args, kernel_scales, argument), after=after)
        name = "one_shot" if call.one_shot else "collective"
        symbol = f"{name}I{_SYMBOL[call.outs[0].dtype]}Li{8 if n % 8 == 0 else 1}ELb{int(call.fp8_wire)}E"
        kernel = kernels.get(name) or only(launches.kernels("collective"), symbol)
        return [gemm, Launch(kernel, (GROUPS,), 256, (argument, GROUPS), after=gemm if call.one_shot else after)]

    def row_tiles(self, call: Call, tile: int) -> int:
        m, span = call.shape[0], call.chunk_rows * call.span_chunks
        return -(-m // (self.world * span)) * self.world * (span // tile) if span % tile == 0 else -(-m // tile)

    def argument(self, call: Call, rank: int) -> bytes:
        """struct Call."""
        (m, n), address = call.shape, self.machine.address
        workspaces = [address(w) for w in self.workspaces] + [0] * (symmetric.MAX_WORLD - self.world)
        return struct.pack(
            "<2i16Q6q4i2Q2?6x2Q",
            rank, self.world, *workspaces, *self.layout,
            m, n, m if call.one_shot else call.chunk_rows, call.span_chunks,
            FLOATS[call.partial], FLOATS[call.outs[0].dtype], 0 if call.bias is None else FLOATS[call.bias.dtype],
            0 if call.bias is None else address(call.bias), address(call.outs[rank]),
            call.fp8_wire, call.one_shot, call.timeout, address(self.failures[rank]),
        )  # fmt: skip
