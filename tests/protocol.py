"""A model of gemm_ar's protocol on P2P memory (csrc/gemm_ar/gemm_ar_sm90.h), and a search through everything it can do.

An actor is a list of steps. Flags only ever grow and have one writer each, and so has every place of data:

    write(place, call), set(flag, value)    always possible
    read(place, call)                       possible; wrong unless the place holds what that call wrote: stale, or overwritten
    wait(flag, value)                       possible once the flag has reached the value

The actors of a rank are its GEMM, its reducers, its gatherers (each: all blocks of a kind, in step) and the end of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Step(NamedTuple):
    kind: str
    what: tuple
    value: int


@dataclass(frozen=True)
class Call:
    """What the ranks run: `chunks` of every owner, or one-shot. `skipped_by`: a rank that raises instead (None: all take part)."""

    chunks: int = 1
    one_shot: bool = False
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
            for actor in ("gemm", "reduce", "gather", "end"):
                self.actors[actor, rank] = []
            epoch = 0
            for number, call in enumerate(self.calls, 1):
                if call.skipped_by == rank or (call.skipped_by is not None and self.bug != "others do not hear of an exception"):
                    continue  # the hosts agree before anything is launched
                epoch += 1
                self.add(rank, call, number, epoch)

    def add(self, rank: int, call: Call, number: int, epoch: int) -> None:
        bug, ranks = self.bug, range(self.world)
        flag_value = 1 if bug == "flags are not stamped with the epoch" else epoch
        gemm, reduce, gather, end = (self.actors[actor, rank] for actor in ("gemm", "reduce", "gather", "end"))
        for actor in (gemm, reduce, gather):
            actor.append(Step("wait", ("ended", rank), epoch - 1))  # launched behind the last call

        def chunk_flag(chunk: int) -> int:
            return 0 if bug == "one flag for all chunks" else chunk

        def deliver(place: tuple, flags: list[tuple]) -> None:
            steps = [Step("write", place, number), *(Step("set", flag, flag_value) for flag in flags)]
            gemm.extend(reversed(steps) if bug == "signal before the data" else steps)

        if call.one_shot:
            deliver(("slot", rank, rank, 0), [("arrived", owner, rank, 0) for owner in ranks])
            if bug != "reducers do not wait":
                reduce.extend(Step("wait", ("arrived", rank, s, 0), flag_value) for s in ranks)
            reduce.extend(Step("read", ("slot", s, s, 0), number) for s in ranks)
        else:
            for chunk in range(call.chunks):
                for i in range(1, self.world + 1):
                    owner = (rank + i) % self.world
                    deliver(("slot", owner, rank, chunk), [("arrived", owner, rank, chunk_flag(chunk))])
            for chunk in range(call.chunks):
                if bug != "reducers do not wait":
                    reduce.extend(Step("wait", ("arrived", rank, s, chunk_flag(chunk)), flag_value) for s in ranks)
                reduce.extend(Step("read", ("slot", rank, s, chunk), number) for s in ranks)
                reduce.append(Step("write", ("sums", rank, chunk), number))
                reduce.append(Step("set", ("reduced", rank, chunk), flag_value))
                for i in range(1, self.world):
                    owner = (rank + i) % self.world
                    if bug != "gatherers do not wait":
                        gather.append(Step("wait", ("reduced", owner, chunk), flag_value))
                    gather.append(Step("read", ("sums", owner, chunk), number))

        for actor, name in ((gemm, "gemm"), (reduce, "reduce"), (gather, "gather")):
            actor.append(Step("set", ("through", name, rank), epoch))
            if not (bug == "the end does not wait for the gather" and name == "gather"):
                end.append(Step("wait", ("through", name, rank), epoch))
        end.append(Step("set", ("done", rank), epoch))
        if bug != "a call ends without the others":
            end.extend(Step("wait", ("done", s), epoch) for s in ranks)
        end.append(Step("set", ("ended", rank), epoch))


BUGS = (
    "flags are not stamped with the epoch",
    "one flag for all chunks",
    "signal before the data",
    "reducers do not wait",
    "gatherers do not wait",
    "the end does not wait for the gather",
    "a call ends without the others",
    "others do not hear of an exception",
)


class Found(Exception):
    """What went wrong, and the steps that led there."""


def explore(programs: Programs) -> int:
    """Every reachable state, by depth-first search; raises Found at a deadlock or a wrong read. Returns the number of states.

    A state is how far each actor has come: everything has one writer, so that says what memory holds. Steps that commute with all
    that others can still do are taken alone: sets (a wait that holds goes on to hold), waits that hold, and accesses to a place
    that nobody else will access in conflict.
    """
    actors = list(programs.actors.values())
    writer: dict[tuple, int] = {}
    history: dict[tuple, list[int]] = {}  # of flags and places: value when the writer is at this step
    for index, steps in enumerate(actors):
        for step in steps:
            if step.kind in ("write", "set"):
                assert writer.setdefault(step.what, index) == index, f"two writers of {step.what}"
    for what, index in writer.items():
        values = [0]
        for step in actors[index]:
            values.append(step.value if step.kind in ("write", "set") and step.what == what else values[-1])
        history[what] = values
    # Per place: (actor, kind, last step that accesses it).
    users: dict[tuple, list[tuple[int, str, int]]] = {}
    for index, steps in enumerate(actors):
        for at, step in enumerate(steps):
            if step.kind in ("read", "write"):
                users.setdefault(step.what, []).append((index, step.kind, at))

    def value(state: tuple[int, ...], what: tuple) -> int:
        index = writer.get(what)
        return 0 if index is None else history[what][state[index]]

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
            raise Found(f"deadlock: {[f'{list(programs.actors)[i]} at {step}' for i, step in steps]}")
        for index, step in enabled:
            if step.kind == "read" and value(state, step.what) != step.value:
                raise Found(f"{list(programs.actors)[index]} reads {step.what} of call {value(state, step.what)} in call {step.value}")
        single = next(((i, step) for i, step in enabled if alone(state, i, step)), None)
        for index, _ in [single] if single else enabled:
            following = (*state[:index], state[index] + 1, *state[index + 1 :])
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return len(seen)
