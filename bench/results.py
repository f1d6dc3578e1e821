"""What a run has measured, as it is stored, and the figures that follow from it.

Every figure is a median over rounds. Ratios are taken within a round, where targets are seconds apart, and
only then reduced: so a neighbour on the machine who comes and goes changes figures, not ratios.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from growth import Grown
from load import Measured
from streams import Streamed

US = 1e6
# Of the stored form; another is not read.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One target under one load in one round.

    Attributes:
        round: Counted from 0.
        target: Its name.
        load: Its name.
        answers: Answers in the window.
        elapsed_s: Length of the window, in seconds.
        p50_s: Half of the answers took at most this long, in seconds.
        p99_s: 99 % of them did.
        cpu_s: CPU time of the target's processes in the window, in seconds.
    """

    round: int
    target: str
    load: str
    answers: int
    elapsed_s: float
    p50_s: float
    p99_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answers / self.elapsed_s

    @property
    def cpu_us(self) -> float:
        """CPU time of the target per answer, in microseconds."""
        return US * self.cpu_s / self.answers


@dataclass(frozen=True, slots=True)
class Soaked:
    """Memory of a target after so many requests."""

    target: str
    requests: int
    rss_bytes: int


def cell(number: int, target: str, load: str, found: Measured) -> Cell:
    """What was measured, with its place."""
    return Cell(number, target, load, found.answers, found.elapsed_s, found.p50_s, found.p99_s, found.cpu_s)


@dataclass(slots=True)
class Results:
    """A run.

    Attributes:
        environment: Machine, versions and date.
        plan: How long everything was measured.
        generator: What made the load.
        targets: Names, in the order of the tables.
        skipped: Names of what was left out, and why.
        cells: Every target under every load, in every round.
        streams: Many streams at once, in every round.
        growth: A growing conversation, in every round.
        rss_bytes: Memory of each target at the end, after all of it.
        soak: Memory over many requests; empty unless it was asked for.
    """

    environment: dict[str, Any]
    plan: dict[str, Any]
    generator: str
    targets: list[str]
    skipped: dict[str, str] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    streams: list[Streamed] = field(default_factory=list)
    growth: list[Grown] = field(default_factory=list)
    rss_bytes: dict[str, int] = field(default_factory=dict)
    soak: list[Soaked] = field(default_factory=list)

    def _of(self, target: str, load: str) -> list[Cell]:
        found = [each for each in self.cells if (each.target, each.load) == (target, load)]
        return sorted(found, key=lambda each: each.round)

    def median(self, target: str, load: str, figure: Callable[[Cell], float]) -> float | None:
        """A figure of a target under a load; None if that was not measured."""
        found = self._of(target, load)
        return median(map(figure, found)) if found else None

    def spread(self, target: str, load: str, figure: Callable[[Cell], float]) -> float:
        """Half the way from the least to the greatest, as a share of the median."""
        found = [figure(each) for each in self._of(target, load)]
        return (max(found) - min(found)) / 2 / median(found)

    def times(self, target: str, other: str, load: str) -> float | None:
        """The target's rate in multiples of the other's; None if one was not measured."""
        pairs = zip(self._of(target, load), self._of(other, load), strict=False)
        ratios = [each.rate / beside.rate for each, beside in pairs]
        return median(ratios) if ratios else None

    def streamed(self, target: str) -> list[Streamed]:
        """Of each round; empty if the target had no such load."""
        return [each for each in self.streams if each.target == target]

    def lengths(self) -> list[int]:
        """At which a growing conversation was measured, in tokens."""
        return sorted({each.tokens for each in self.growth})

    def grown(self, target: str, tokens: int, figure: Callable[[Grown], float]) -> float | None:
        """A figure of a growing conversation at one of the lengths; None if it was not measured."""
        found = [figure(each) for each in self.growth if (each.target, each.tokens) == (target, tokens)]
        return median(found) if found else None


def stored(results: Results) -> str:
    """A run as JSON, a record a line."""
    held = {"version": VERSION, **asdict(results)}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in held.items()) + "\n}\n"


def _lines(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def _read(kind: Callable[..., object] | None, held: Any) -> Any:  # noqa: ANN401 - JSON may be anything
    return [kind(**row) for row in held] if kind else held


def read(file: Path) -> Results:
    """A stored run.

    Raises:
        ValueError: It is of another version.
    """
    held = json.loads(file.read_text("utf-8"))
    if held.pop("version") != VERSION:
        raise ValueError(f"{file} is of another version")
    kinds = {"cells": Cell, "streams": Streamed, "growth": Grown, "soak": Soaked}
    return Results(**{key: _read(kinds.get(key), rows) for key, rows in held.items()})
