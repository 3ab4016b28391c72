"""A model of gemm_ar's protocol on P2P memory (csrc/gemm_ar/gemm_ar_sm90.h), and a search through everything it can do.

An actor is a list of steps. Flags only ever grow; what writes a flag or a place of data belongs to one rank, call after call:

    write(place, call), set(flag, value)    always possible
    read(place, call)                       possible; wrong unless the place holds what that call wrote: stale, or overwritten
    wait(flag, value)                       possible once the flag has reached the value

The actors of a rank are its GEMM, its reducers and its gatherers (`spans`, `pull`; each: all blocks of a kind, in step), its two streams of
copies (`pair`), two blocks (`one_shot`), and the end of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Step(NamedTuple):
    kind: str
    what: tuple
    value: int


ACTORS = ("gemm", "reduce", "gather", "copies 0", "copies 1", "block 0", "block 1", "end")


@dataclass(frozen=True)
class Call:
    """What the ranks run. `parts`: chunks of every owner, or blocks of one_shot. `skipped_by`: a rank that raises instead."""

    parts: int = 1
    algorithm: str = "spans"
    wire: str = "bf16"
    skipped_by: int | None = None


@dataclass
class Programs:
    """The actors' programs for a sequence of calls; `bug` plants a mistake."""

    world: int
    calls: Sequence[Call]
    bug: str = ""
    actors: dict[tuple[str, int], list[Step]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in range(self.world):
            for actor in ACTORS:
                self.actors[actor, rank] = []
            epoch = 0
            for number, call in enumerate(self.calls, 1):
                if call.skipped_by == rank or (call.skipped_by is not None and self.bug != "others do not hear of an exception"):
                    continue  # the hosts agree before anything is launched
                epoch += 1
                self.add(rank, call, number, epoch)

    def add(self, rank: int, call: Call, number: int, epoch: int) -> None:
        self.rank, self.call, self.number, self.epoch = rank, call, number, epoch
        self.value = 1 if self.bug == "flags are not stamped with the epoch" else epoch
        used = {"spans": ACTORS[:3], "pull": ACTORS[:2], "pair": ("gemm", *ACTORS[3:5]), "one_shot": ("gemm", *ACTORS[5:7])}[call.algorithm]
        for actor in used:
            self.step(actor, "wait", ("ended", rank), epoch - 1)  # launched behind the last call
        getattr(self, call.algorithm)()
        for actor in used:
            self.step(actor, "set", ("through", actor, rank), epoch)
            if (self.bug, actor) not in (("the end does not wait for the gather", "gather"), ("the end does not wait for the copies", "copies 0")):
                self.step("end", "wait", ("through", actor, rank), epoch)
        if call.algorithm == "pair":
            for chunk in range(call.parts):
                self.read("end", "out", rank, chunk)  # whoever wanted the result
        if call.algorithm == "pull":
            self.step("end", "set", ("done", rank), epoch)
            if self.bug != "a call ends without the others":
                self.wait_for("end", *(("done", s) for s in range(self.world)))
        self.step("end", "set", ("ended", rank), epoch)

    def step(self, actor: str, kind: str, what: tuple, value: int) -> None:
        self.actors[actor, self.rank].append(Step(kind, what, value))

    def read(self, actor: str, *place) -> None:
        self.step(actor, "read", place, self.number)

    def write(self, actor: str, *place) -> None:
        self.step(actor, "write", place, self.number)

    def wait_for(self, actor: str, *flags: tuple) -> None:
        for flag in flags:
            self.step(actor, "wait", flag, self.value)

    def give(self, actor: str, place: tuple, *flags: tuple) -> None:
        """Data, then the flags that say so."""
        steps = [Step("write", place, self.number), *(Step("set", flag, self.value) for flag in flags)]
        self.actors[actor, self.rank].extend(reversed(steps) if self.bug == "signal before the data" else steps)

    def flag(self, name: str, at: int, of: int, chunk: int) -> tuple:
        return name, at, of, 0 if self.bug == "one flag for all chunks" else chunk

    def spans(self) -> None:
        rank, world, chunks = self.rank, self.world, range(self.call.parts)
        for chunk in chunks:
            for i in range(1, world + 1):
                owner = (rank + i) % world
                self.give("gemm", ("slot", owner, rank, chunk), self.flag("arrived", owner, rank, chunk))
        for chunk in chunks:
            if self.bug != "reducers do not wait":
                self.wait_for("reduce", *(self.flag("arrived", rank, s, chunk) for s in range(world)))
            for s in range(world):
                self.read("reduce", "slot", rank, s, chunk)
            self.give("reduce", ("sums", rank, chunk), *(("reduced", s, rank, chunk) for s in range(world)))
            for i in range(1, world):
                owner = (rank + i) % world
                if self.bug != "gatherers do not wait":
                    self.wait_for("gather", ("reduced", rank, owner, chunk))
                self.read("gather", "sums", owner, chunk)

    def pair(self) -> None:
        rank, peer, chunks = self.rank, 1 - self.rank, range(self.call.parts)
        fp8 = self.call.wire == "fp8"
        for chunk in chunks:
            self.give("gemm", ("slot", rank, rank, chunk), ("delivered", rank, chunk))
        for chunk in chunks:
            if self.bug != "own rows do not wait for the peer's":
                self.wait_for("gemm", self.flag("arrived", rank, peer, chunk))
            self.read("gemm", "slot", rank, peer, chunk)
            self.give("gemm", ("sums", rank, chunk), ("summed", rank, chunk) if fp8 else ("reduced", peer, rank, chunk))
        for chunk in chunks:
            copies = f"copies {chunk % 2}"
            if self.bug != "copies do not wait":
                self.wait_for(copies, ("delivered", rank, chunk))
            self.read(copies, "slot", rank, rank, chunk)
            self.give(copies, ("slot", peer, rank, chunk), self.flag("arrived", peer, rank, chunk))
        for chunk in chunks:
            copies, source = f"copies {chunk % 2}", "codes" if fp8 else "sums"
            if fp8:
                self.wait_for(copies, ("summed", rank, chunk))
                self.read(copies, "sums", rank, chunk)
                self.give(copies, ("codes", rank, chunk), ("reduced", peer, rank, chunk))
            if self.bug != "fetches do not wait":
                self.wait_for(copies, ("reduced", rank, peer, chunk))
            self.read(copies, source, peer, chunk)
            self.write(copies, "out", rank, chunk)

    def pull(self) -> None:
        """One-shot on AMD GPUs: everyone reads everyone's slot, and no call ends without the others."""
        ranks = range(self.world)
        self.give("gemm", ("slot", self.rank, self.rank, 0), *(("arrived", s, self.rank, 0) for s in ranks))
        self.wait_for("reduce", *(("arrived", self.rank, s, 0) for s in ranks))
        for s in ranks:
            self.read("reduce", "slot", s, s, 0)

    def one_shot(self) -> None:
        rank, parity = self.rank, 0 if self.bug == "inboxes do not alternate" else self.epoch % 2
        peers = [(rank + i) % self.world for i in range(1, self.world)]
        for part in range(2):  # with one block it has both
            self.give("gemm", ("slot", rank, rank, part), ("computed", rank, part))
        for block in range(self.call.parts):
            actor, parts = f"block {block}", range(2) if self.call.parts == 1 else (block,)
            self.wait_for(actor, *(("computed", rank, part) for part in range(2)))  # launched behind the GEMM
            for peer in peers:
                for part in parts:
                    self.read(actor, "slot", rank, rank, part)
                    self.write(actor, "inbox", peer, rank, parity, part)
                self.step(actor, "set", ("pushed", peer, rank, block), self.value)
            for peer in peers:
                if self.bug != "blocks do not wait":
                    self.wait_for(actor, ("pushed", rank, peer, block))
                for part in parts:
                    self.read(actor, "inbox", rank, peer, parity, part)


BUGS = (
    "flags are not stamped with the epoch",
    "one flag for all chunks",
    "signal before the data",
    "reducers do not wait",
    "gatherers do not wait",
    "the end does not wait for the gather",
    "others do not hear of an exception",
    "inboxes do not alternate",
    "blocks do not wait",
    "a call ends without the others",
)
PAIR_BUGS = (
    "flags are not stamped with the epoch",
    "one flag for all chunks",
    "signal before the data",
    "own rows do not wait for the peer's",
    "copies do not wait",
    "fetches do not wait",
    "the end does not wait for the copies",
)


class Found(Exception):
    """What went wrong, and the steps that led there."""


def explore(programs: Programs) -> int:
    """Every reachable state, by depth-first search; raises Found at a deadlock or a wrong read. Returns the number of states.

    A state is how far each actor has come. That says what memory holds: what is written last is of the latest call, because all
    writers of a place belong to one rank, whose calls follow each other. Steps that commute with all that others can still do are
    taken alone: sets (a wait that holds goes on to hold), waits that hold, and accesses to a place that nobody else will access in
    conflict.
    """
    names = [name for name, steps in programs.actors.items() if steps]
    actors = [programs.actors[name] for name in names]
    history: dict[tuple, dict[int, list[int]]] = {}  # of flags and places: by writer, the value when it is at this step
    for index, steps in enumerate(actors):
        for what in {step.what for step in steps if step.kind in ("write", "set")}:
            values = [0]
            for step in steps:
                values.append(step.value if step.kind in ("write", "set") and step.what == what else values[-1])
            history.setdefault(what, {})[index] = values
    for what, writers in history.items():
        assert len({names[index][1] for index in writers}) == 1, f"two ranks write {what}"
    # Per place: (actor, kind, last step that accesses it).
    users: dict[tuple, list[tuple[int, str, int]]] = {}
    for index, steps in enumerate(actors):
        for at, step in enumerate(steps):
            if step.kind in ("read", "write"):
                users.setdefault(step.what, []).append((index, step.kind, at))

    def value(state: tuple[int, ...], what: tuple) -> int:
        return max((values[state[index]] for index, values in history.get(what, {}).items()), default=0)

    def alone(state: tuple[int, ...], index: int, step: Step) -> bool:
        if step.kind in ("set", "wait"):
            return True
        return not any(i != index and at >= state[i] and "write" in (kind, step.kind) for i, kind, at in users[step.what])

    start = (0,) * len(actors)
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        steps = [(i, actors[i][at]) for i, at in enumerate(state) if at < len(actors[i])]
        enabled = [(i, step) for i, step in steps if step.kind != "wait" or value(state, step.what) >= step.value]
        if steps and not enabled:
            raise Found(f"deadlock: {[f'{names[i]} at {step}' for i, step in steps]}")
        for index, step in enabled:
            if step.kind == "read" and value(state, step.what) != step.value:
                raise Found(f"{names[index]} reads {step.what} of call {value(state, step.what)} in call {step.value}")
        single = next(((i, step) for i, step in enabled if alone(state, i, step)), None)
        for index, _ in [single] if single else enabled:
            following = (*state[:index], state[index] + 1, *state[index + 1 :])
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return len(seen)
