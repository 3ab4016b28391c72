"""A gated MLP over two processes: gate and up split by columns, down by rows with gemm_ar; the same answer as one process."""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from mori_ops import distributed
from mori_ops.demo.report import Check, at_most
from mori_ops.nn import Mxfp8Linear, RowParallelMxfp8Linear

WORLD = 2
TOKENS, WIDTH, INNER = 48, 1024, 2720  # INNER is 85 blocks of 32: the ranks hold 43 and 42
TIMEOUT = timedelta(seconds=60)


def float_mlp() -> tuple[nn.Linear, nn.Linear, nn.Linear, Tensor]:
    """gate, up, down and the input, the same in every process."""
    torch.manual_seed(7)
    layers = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
    return *layers, torch.randn(TOKENS, WIDTH)


class Mlp(nn.Module):
    """y = down(silu(gate(x)) * up(x)) in MXFP8, split over the default process group, or whole when there is none."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, *, wire: str = "bf16"):
        super().__init__()
        self.gate, self.up = column_parallel(gate), column_parallel(up)
        self.down = RowParallelMxfp8Linear.from_linear(down, wire=wire)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def column_parallel(linear: nn.Linear) -> Mxfp8Linear:
    mine = distributed.shard(linear.out_features)
    codes, scale = torch.ops.mori.mxfp8_quantize_weight(linear.weight.detach()[mine])
    return Mxfp8Linear(codes, scale, linear.bias.detach()[mine])


@torch.inference_mode()
def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    *layers, x = float_mlp()
    results = {wire: Mlp(*layers, wire=wire)(x.bfloat16()) for wire in distributed.WIRES}
    torch.save(results, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def distance(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@torch.inference_mode()
def run(console: Console) -> list[Check]:
    *layers, x = float_mlp()
    gate, up, down = layers
    alone = Mlp(*layers)(x.bfloat16())
    full_precision = down(F.silu(gate(x)) * up(x))
    with tempfile.TemporaryDirectory() as folder, console.status(f"{WORLD} processes over gloo"):
        mp.spawn(work, (folder,), nprocs=WORLD)
        ranks = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(WORLD)]

    together = ranks[0]["bf16"]
    differing = sum((rank[wire] != ranks[0][wire]).sum().item() for rank in ranks for wire in rank)
    fp8 = distance(ranks[0]["fp8"], alone)
    console.print(f"MLP {WIDTH} -> {INNER} -> {WIDTH} over {TOKENS} tokens: {(together == alone).double().mean():.2%} of the values "
                  f"of {WORLD} processes have the bits of one process")
    return [
        at_most("TP MLP: relative L2 to one process", distance(together, alone), 1e-4),
        at_most("TP MLP: values that differ between ranks", differing, 0),
        at_most("TP MLP: relative L2 to the fp32 MLP", distance(together, full_precision), 8e-2),
        Check("TP MLP, fp8 wire: relative L2 to one process", fp8, "5e-3 .. 4.5e-2", 5e-3 <= fp8 <= 4.5e-2),
    ]
