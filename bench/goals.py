"""What the proxy shall reach, and whether it does: ratios to what was measured in the same run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from growth import Grown
from loads import LARGE, REFERENCE, SMALL_MANY, SMALL_ONE, STREAMED, STRICT
from results import Results
from rivals import RIVALS
from streams import Streamed
from targets import DIRECT, GATED, NGINX, OPEN, OPEN_FAST

MS = 1e3
US = 1e6
MB = 1e6
KIB = 1024
_AWECOMPRESS, _LITELLM = RIVALS[0].name, RIVALS[-1].name
# The load must reach this multiple of nginx by itself, and keep ours busy for this share of their core.
DIRECT_TIMES = 1.2
BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table.

    Attributes:
        name: What is measured, on what.
        found: The figure; None if it was not measured.
        limit: What it shall be at most, or at least.
        at_least: Which of the two.
        unit: Of both; "x name" for a multiple of another target's rate.
    """

    name: str
    found: float | None
    limit: float
    at_least: bool
    unit: str

    @property
    def is_met(self) -> bool | None:
        """None if it was not measured."""
        if self.found is None:
            return None
        return self.found >= self.limit if self.at_least else self.found <= self.limit


def _scaled(found: float | None, factor: float) -> float | None:
    return None if found is None else found * factor


def _sound(results: Results) -> Iterator[Goal]:
    """Whether the reference load can tell what it shall tell: not itself."""
    times = results.times(REFERENCE, DIRECT, NGINX, SMALL_MANY)
    name = f"the {REFERENCE} load itself: {DIRECT}, {SMALL_MANY}"
    yield Goal(name, times, DIRECT_TIMES, at_least=True, unit=f"x {NGINX}")
    for target in (GATED, OPEN):
        busy = results.median(REFERENCE, target, SMALL_MANY, lambda cell: cell.busy)
        name = f"the {REFERENCE} load keeps busy: {target}, {SMALL_MANY}"
        yield Goal(name, busy, BUSY, at_least=True, unit="of a core")


def _ratios(results: Results, by: str) -> Iterator[Goal]:
    for target, load, other, limit in (
        (GATED, SMALL_MANY, NGINX, 0.5),
        (GATED, SMALL_MANY, _AWECOMPRESS, 2.5),
        (GATED, SMALL_MANY, _LITELLM, 50.0),
        (GATED, STREAMED, NGINX, 0.95),
        (OPEN, SMALL_MANY, NGINX, 0.35),
        (OPEN, STREAMED, NGINX, 0.9),
        (OPEN, LARGE, NGINX, 0.65),
    ):
        found = results.times(by, target, other, load)
        yield Goal(f"{target}: {load}, {by}", found, limit, at_least=True, unit=f"x {other}")
    for target, limit in ((GATED, 0.25), (OPEN, 0.35)):
        p50_s = results.median(by, target, SMALL_ONE, lambda cell: cell.p50_s)
        name = f"{target}: {SMALL_ONE}, p50, {by}"
        yield Goal(name, _scaled(p50_s, MS), limit, at_least=False, unit="ms")


def _costs(results: Results) -> Iterator[Goal]:
    for target, limit in ((GATED, 200), (OPEN, 200), (OPEN_FAST, 260)):
        held = results.rss_bytes.get(target)
        yield Goal(
            f"{target}: memory after all loads", _scaled(held, 1 / MB), limit, at_least=False, unit="MB"
        )


def _conversations(results: Results) -> Iterator[Goal]:
    def most(target: str, figure: Callable[[Grown], float]) -> float | None:
        found = [results.grown(target, tokens, figure) for tokens in results.lengths()]
        known = [each for each in found if each is not None]
        return max(known) * MS if known else None

    longest = max(results.lengths(), default=0)
    for target, cold_ms in ((OPEN, 250.0), (OPEN_FAST, 30.0)):
        for name, found, limit in (
            ("a warm turn, at its worst length", most(target, lambda each: each.warm_s), 1.0),
            (f"first sight of {longest:,} tokens", most(target, lambda each: each.cold_s), cold_ms),
            (
                "the loop held, at worst",
                most(target, lambda each: max(each.cold_held_s, each.warm_held_s)),
                5.0,
            ),
        ):
            yield Goal(f"{target}: {name}", found, limit, at_least=False, unit="ms CPU")


def added_first_s(results: Results, target: str) -> float | None:
    """What a target adds to the direct p99 of the first byte with many streams, in seconds."""
    pairs = zip(results.streamed(target), results.streamed(DIRECT), strict=False)
    added = [each.first_p99_s - direct.first_p99_s for each, direct in pairs]
    return median(added) if added else None


def _streams(results: Results) -> Iterator[Goal]:
    def figure(target: str, of: Callable[[Streamed], float]) -> float | None:
        found = [of(each) for each in results.streamed(target)]
        return median(found) if found else None

    for target in (GATED, OPEN):
        found = results.streamed(target)
        title = f"{target}: {found[0].streams if found else 0:,} streams"
        wrong = float(sum(each.wrong for each in found)) if found else None
        first_ms = _scaled(added_first_s(results, target), MS)
        late_ms = _scaled(figure(target, lambda each: each.late_p99_s), MS)
        cpu_us = _scaled(figure(target, lambda each: each.chunk_cpu_s), US)
        held = max((each.held_bytes / each.streams / KIB for each in found), default=None)
        yield Goal(f"{title}, with a byte lost or moved", wrong, 0, at_least=False, unit="streams")
        yield Goal(f"{title}, added first byte p99", first_ms, 250, at_least=False, unit="ms")
        yield Goal(f"{title}, chunks late p99", late_ms, 100, at_least=False, unit="ms")
        yield Goal(f"{title}, CPU per chunk", cpu_us, 30, at_least=False, unit="µs")
        yield Goal(f"{title}, memory of each", held, 64, at_least=False, unit="KiB")


def goals(results: Results) -> list[Goal]:
    """Every goal, whether or not the run has measured it."""
    ratios = [goal for by in (REFERENCE, STRICT) for goal in _ratios(results, by)]
    return [*_sound(results), *ratios, *_costs(results), *_conversations(results), *_streams(results)]
