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
VERSION = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One target under one load in one round.

    Attributes:
        by: What made the load (`loads.REFERENCE`, `loads.STRICT`).
        round: Counted from 0.
        target: Its name.
        load: Its name.
        answers: Answers in the window.
        elapsed_s: Length of the window, in seconds.
        p50_s: Half of the answers took at most this long, in seconds.
        p99_s: 99 % of them did.
        cpu_s: CPU time of the target's processes in the window, in seconds.
    """

    by: str
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
    def busy(self) -> float:
        """Share of its core that the target took (0..1): near 1, it was the target that was the limit."""
        return self.cpu_s / self.elapsed_s

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


def cell(by: str, number: int, target: str, load: str, found: Measured) -> Cell:
    """What was measured, with its place."""
    times = found.elapsed_s, found.p50_s, found.p99_s, found.cpu_s
    return Cell(by, number, target, load, found.answers, *times)


@dataclass(slots=True)
class Results:
    """A run.

    Attributes:
        environment: Machine, versions and date.
        plan: How long everything was measured.
        generators: What made the loads.
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
    generators: list[str]
    targets: list[str]
    skipped: dict[str, str] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    streams: list[Streamed] = field(default_factory=list)
    growth: list[Grown] = field(default_factory=list)
    rss_bytes: dict[str, int] = field(default_factory=dict)
    soak: list[Soaked] = field(default_factory=list)

    def _of(self, by: str, target: str, load: str) -> list[Cell]:
        found = [each for each in self.cells if (each.by, each.target, each.load) == (by, target, load)]
        return sorted(found, key=lambda each: each.round)

    def median(self, by: str, target: str, load: str, figure: Callable[[Cell], float]) -> float | None:
        """A figure of a target under a load; None if that was not measured."""
        found = self._of(by, target, load)
        return median(map(figure, found)) if found else None

    def spread(self, by: str, target: str, load: str, figure: Callable[[Cell], float]) -> float:
        """Half the way from the least to the greatest, as a share of the median."""
        found = [figure(each) for each in self._of(by, target, load)]
        return (max(found) - min(found)) / 2 / median(found)

    def times(self, by: str, target: str, other: str, load: str) -> float | None:
        """The target's rate in multiples of the other's; None if one was not measured."""
        beside = {each.round: each.rate for each in self._of(by, other, load)}
        found = (each for each in self._of(by, target, load) if each.round in beside)
        ratios = [each.rate / beside[each.round] for each in found]
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
