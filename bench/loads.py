"""How programs are measured: the loads, how long each lasts, and what generates them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvloop
import wrk
from conversations import Conversation, large, small, streamed
from load import LoadError, Measured, Requests, measure
from targets import Target

# How long a target may take for a first answer under load, and for what a generator has left behind.
PATIENCE_S = 30.0


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
        warm_s: Before the window of the first round (wrk) or of each (our own generator).
        window_s: What is measured. wrk knows whole seconds only.
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
    streams: int
    chunks: int
    growth_tokens: tuple[int, ...]
    growth_turns: int
    soak_requests: int = 200_000
    soak_step: int = 20_000


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
USUAL = Plan(5, 1, 2, 1_000, 20, (10_000, 25_000, 50_000, 100_000, 200_000), 20)
QUICK = Plan(3, 1, 1, 1_000, 15, (10_000, 50_000, 200_000), 10)
SMOKE = Plan(1, 0.01, 0.05, 10, 2, (1_000, 2_000), 2, 20, 10)


class Generator(Protocol):
    """Puts a target under a load."""

    @property
    def name(self) -> str:
        """As the report says it."""

    def run(self, target: Target, load: Load) -> Measured:
        """One window.

        Raises:
            LoadError: The target did not answer as it should.
        """


def _conversations(target: Target, load: Load) -> list[Conversation]:
    return [load.conversation(f"{load.name} {index}", target.headers) for index in range(load.connections)]


class Own:
    """The generator in Python, `load`."""

    name = "the bench's own generator"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._asked: dict[tuple[str, str], list[Requests]] = {}

    def run(self, target: Target, load: Load) -> Measured:
        """See `Generator`."""
        key = (target.name, load.name)
        if key not in self._asked:
            self._asked[key] = [each.requests() for each in _conversations(target, load)]
        program = target.program
        return uvloop.run(
            measure(
                program.address,
                self._asked[key],
                warm_s=self._plan.warm_s,
                window_s=self._plan.window_s,
                cpu_s=program.cpu_s,
            )
        )


class Wrk:
    """wrk, with requests written to `folder`."""

    name = "wrk"

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._runs: dict[tuple[str, str], int] = {}

    def run(self, target: Target, load: Load) -> Measured:
        """See `Generator`."""
        key = (target.name, load.name)
        folder = self._folder / f"{target.name} {load.name}".replace("/", " ")
        if key not in self._runs:
            wrk.written(folder, _conversations(target, load))
            self._window(target, load, folder, self._plan.warm_s)
        return self._window(target, load, folder, self._plan.window_s)

    def _window(self, target: Target, load: Load, folder: Path, seconds: float) -> Measured:
        """Load it for so long, and longer until there is an answer."""
        whole_s = max(1, round(seconds))
        while whole_s < PATIENCE_S:
            number = self._runs[target.name, load.name] = self._runs.get((target.name, load.name), -1) + 1
            found = wrk.run(target.program, folder, load.connections, number=number, seconds=whole_s)
            target.program.settle(PATIENCE_S)
            if found.answers:
                return found
            whole_s *= 2
        raise LoadError(f"no answer within {whole_s / 2} s")
