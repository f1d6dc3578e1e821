"""How programs are measured: the loads, how long each lasts, and what generates them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvloop
import wrk
from conversations import Conversation, large, small, streamed
from load import LoadError, Measured, Requests, measure, tell_upstream
from processes import Program
from targets import Target

# How long a target may take for a first answer under load, and for what a generator has left behind.
PATIENCE_S = 30.0
# Answers on each connection that a window is held open for.
ANSWERS_EACH = 8


@dataclass(frozen=True, slots=True)
class Load:
    """What a target is asked, by how many at once.

    Attributes:
        name: As the results know it.
        connections: How many ask at once.
        conversation: What they ask, for a session's id and further header lines.
    """

    name: str
    connections: int
    conversation: Callable[[str, Sequence[str]], Conversation]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long it is measured; seconds are for one target under one load in one round.

    Attributes:
        rounds: Every target is under every load once in each.
        warm_s: Before the window of the first round (wrk) or of each (the reference load).
        window_s: What is measured, with many connections. wrk knows whole seconds only.
        one_s: The same with one connection.
        most_s: What is measured at most: a window is longer for a target that gives few answers.
        streams: How many are held open at once.
        chunks: Events in each of these.
        growth_tokens: Lengths at which a growing conversation is measured.
        growth_turns: Turns that are sent at each length.
        soak_requests: Small requests over which memory is watched.
        soak_step: After how many of these it is noted each time.
    """

    rounds: int
    warm_s: float
    window_s: float
    one_s: float
    most_s: float
    streams: int
    chunks: int
    growth_tokens: tuple[int, ...]
    growth_turns: int
    soak_requests: int = 200_000
    soak_step: int = 20_000

    def seconds(self, load: Load) -> float:
        """How long a target is measured under a load."""
        return self.one_s if load.connections == 1 else self.window_s


SMALL_ONE = "small c=1"
SMALL_MANY = "small c=32"
STREAMED = "SSE c=32"
LARGE = "853 KB c=4"
LOADS = (
    Load(SMALL_ONE, 1, small),
    Load(SMALL_MANY, 32, small),
    Load(STREAMED, 32, streamed),
    Load(LARGE, 4, large),
)
# The two ways to put a target under a load.
REFERENCE, STRICT = "reference", "wrk"
USUAL = Plan(3, 0.3, 2, 1, 6, 1_000, 20, (10_000, 50_000, 100_000, 200_000), 20)
QUICK = Plan(2, 0.3, 1, 1, 8, 1_000, 15, (10_000, 50_000, 200_000), 10)
SMOKE = Plan(1, 0.01, 0.05, 0.05, 0.05, 10, 3, (1_000, 2_000), 2, 20, 10)


class Generator(Protocol):
    """Puts a target under a load."""

    @property
    def name(self) -> str:
        """As the results know it."""

    def run(self, target: Target, load: Load) -> Measured:
        """One window.

        Raises:
            LoadError: The target did not answer as it should.
        """


def _conversations(target: Target, load: Load) -> list[Conversation]:
    return [load.conversation(f"{load.name} {index}", target.headers) for index in range(load.connections)]


def _enough(load: Load) -> int:
    """Answers that make a window long enough: what is cut off at its ends weighs little beside them."""
    return ANSWERS_EACH * load.connections


class Reference:
    """Clients and a provider that decode what they get: `load`."""

    name = REFERENCE

    def __init__(self, plan: Plan, upstream: Program) -> None:
        self._plan = plan
        self._upstream = upstream
        self._asked: dict[tuple[str, str], list[Requests]] = {}

    def run(self, target: Target, load: Load) -> Measured:
        """See `Generator`."""
        key = (target.name, load.name)
        if key not in self._asked:
            self._asked[key] = [each.requests() for each in _conversations(target, load)]
        tell_upstream(self._upstream.address, decodes=True)
        try:
            return uvloop.run(
                measure(
                    target.program.address,
                    self._asked[key],
                    warm_s=self._plan.warm_s,
                    window_s=self._plan.seconds(load),
                    most_s=self._plan.most_s,
                    enough=_enough(load),
                    cpu_s=target.program.cpu_s,
                )
            )
        finally:
            tell_upstream(self._upstream.address, decodes=False)


class Wrk:
    """wrk, with requests written to `folder`."""

    name = STRICT

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._runs: dict[tuple[str, str], int] = {}
        self._lengths_s: dict[tuple[str, str], int] = {}

    def run(self, target: Target, load: Load) -> Measured:
        """See `Generator`."""
        key = (target.name, load.name)
        folder = self._folder / f"{target.name} {load.name}".replace("/", " ")
        if key not in self._runs:
            wrk.written(folder, _conversations(target, load))
            self._lengths_s[key] = max(1, round(self._plan.seconds(load)))
            self._window(target, load, folder, 1)
        while True:
            seconds = self._lengths_s[key]
            found = self._window(target, load, folder, seconds)
            if seconds >= self._plan.most_s or found.answers >= _enough(load):
                break
            wanted = seconds * _enough(load) / max(1, found.answers)
            self._lengths_s[key] = round(min(max(wanted, seconds + 1), max(1, self._plan.most_s)))
        if not found.answers:
            raise LoadError(f"no answer within {seconds} s")
        return found

    def _window(self, target: Target, load: Load, folder: Path, seconds: int) -> Measured:
        number = self._runs[target.name, load.name] = self._runs.get((target.name, load.name), -1) + 1
        found = wrk.run(target.program, folder, load.connections, number=number, seconds=seconds)
        target.program.settle(PATIENCE_S)
        return found
