"""From raw measurements to the table.

Every figure is a median over rounds. Ratios are taken within a round, where targets are seconds apart, and
only then reduced: so a neighbour on the machine who comes and goes changes figures, not ratios.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

MS = 1e3
US = 1e6
MB = 1e6
COLUMNS = (
    "",
    "small c=1 p50 ms",
    "added",
    "p99",
    "small c=32 req/s",
    "CPU µs/req",
    "SSE c=32 streams/s",
    "chunks/s",
    "853 KB c=4 req/s",
    "RSS MB",
)


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
        cpu_s: CPU time of the target's process in the window, in seconds.
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


def percentile(latencies_s: Sequence[float], share: float) -> float:
    """The smallest latency that at least `share` (0..1) of them do not exceed; the list is not empty."""
    ordered = sorted(latencies_s)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Results:
    """The cells of a run. Every figure is by target and load.

    Args:
        cells: Every target under every load, in every round.
        direct: The target that latencies are compared with.
        usual: The one that rates are compared with.
    """

    def __init__(self, cells: Sequence[Cell], *, direct: str, usual: str) -> None:
        self._cells = cells
        self._direct = direct
        self._usual = usual

    def _of(self, target: str, load: str) -> list[Cell]:
        found = [cell for cell in self._cells if (cell.target, cell.load) == (target, load)]
        return sorted(found, key=lambda cell: cell.round)

    def median(self, target: str, load: str, figure: Callable[[Cell], float]) -> float:
        return median(map(figure, self._of(target, load)))

    def spread(self, target: str, load: str, figure: Callable[[Cell], float]) -> float:
        """Half the way from the least to the greatest, as a share of the median."""
        found = list(map(figure, self._of(target, load)))
        return (max(found) - min(found)) / 2 / median(found)

    def times(self, target: str, load: str) -> float:
        """The target's rate in multiples of the usual one's."""
        pairs = zip(self._of(target, load), self._of(self._usual, load), strict=True)
        return median(cell.rate / usual.rate for cell, usual in pairs)

    def added_s(self, target: str, load: str) -> float:
        """What the target adds to the direct p50, in seconds."""
        pairs = zip(self._of(target, load), self._of(self._direct, load), strict=True)
        return median(cell.p50_s - direct.p50_s for cell, direct in pairs)


def _rate(results: Results, target: str, load: str) -> str:
    rate = results.median(target, load, lambda cell: cell.rate)
    spread = results.spread(target, load, lambda cell: cell.rate)
    return f"{rate:,.0f} ±{spread:.0%} ({results.times(target, load):.1f}x)"


def _milliseconds(results: Results, target: str, load: str) -> list[str]:
    p50_s = results.median(target, load, lambda cell: cell.p50_s)
    spread = results.spread(target, load, lambda cell: cell.p50_s)
    p99_s = results.median(target, load, lambda cell: cell.p99_s)
    added_s = results.added_s(target, load)
    return [f"{MS * p50_s:.3f} ±{spread:.0%}", f"{MS * added_s:+.3f}", f"{MS * p99_s:.2f}"]


def table(results: Results, targets: Sequence[str], rss_bytes: Mapping[str, int], chunks: int) -> str:
    """The results in Markdown. `chunks` is the number of events in a stream."""
    rows = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1))]
    for target in targets:
        cpu_us = results.median(target, "small c=32", lambda cell: cell.cpu_us)
        streams = results.median(target, "SSE c=32", lambda cell: cell.rate)
        rss = rss_bytes.get(target, 0) / MB
        rows.append(
            (
                target,
                *_milliseconds(results, target, "small c=1"),
                _rate(results, target, "small c=32"),
                f"{cpu_us:.0f}" if cpu_us else "",
                _rate(results, target, "SSE c=32"),
                f"{streams * chunks:,.0f}",
                _rate(results, target, "853 KB c=4"),
                f"{rss:.0f}" if rss else "",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
