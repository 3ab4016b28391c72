"""Processes that hold a process group (gloo, or NCCL and a GPU each), for tests of collective operators.

`Ranks(4).run(function, *args, world=2)` calls `function(group, *args)` in the first two processes, `group` being their
process group, and returns what they return. Nothing can hang: a call has `TIMEOUT` seconds, then the processes are killed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 60.0


class Ranks:
    def __init__(self, world: int, backend: str = "gloo", timeout: float = TIMEOUT) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.timeout = timeout
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "mori_ops"])  # imported once for all ranks
        self.processes, self.pipes = [], []
        for rank in range(world):
            pipe, end = context.Pipe()
            process = context.Process(target=serve, args=(rank, world, backend, timeout, self.folder.name, end), daemon=True)
            process.start()
            end.close()
            self.processes.append(process)
            self.pipes.append(pipe)

    def run(self, function: Callable[..., Any], *args: Any, world: int | None = None) -> list[Any]:
        pipes = self.pipes[:world]
        for pipe in pipes:
            pipe.send((function, len(pipes), args))
        deadline = time.monotonic() + self.timeout
        failures, results = [], []
        for rank, pipe in enumerate(pipes):
            try:
                ok, value = pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else (False, "no answer in time")
            except EOFError:
                ok, value = False, "the process ended"
            (results if ok else failures).append(value if ok else f"rank {rank}: {value}")
        if any("no answer" in failure for failure in failures):
            self.close()
        assert not failures, "\n".join(failures)
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def serve(rank: int, world: int, backend: str, timeout: float, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout / 2))
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world)}
    groups[world] = dist.group.WORLD
    while True:
        try:
            function, size, args = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(timeout - 5)
        try:
            answer = True, function(groups[size], *args)
        except BaseException:
            answer = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
