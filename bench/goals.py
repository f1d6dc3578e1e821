"""What the proxy shall reach, and whether it does: ratios to what was measured in the same run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from loads import LARGE, SMALL_MANY, SMALL_ONE, STREAMED
from results import Results
from rivals import RIVALS
from streams import Streamed
from targets import DIRECT, GATED, NGINX, OPEN, OPEN_FAST
from upstream import CHUNKS

MS = 1e3
US = 1e6
MB = 1e6
KIB = 1024
_AWECOMPRESS, _LITELLM = RIVALS[0].name, RIVALS[-1].name
# Below this rate of nginx it is the load that is measured, and ratios to nginx flatter us.
NGINX_RATE = 10_000


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


def _ratios(results: Results) -> Iterator[Goal]:
    for target, load, other, limit in (
        (GATED, SMALL_MANY, NGINX, 0.5),
        (GATED, SMALL_MANY, _AWECOMPRESS, 2.5),
        (GATED, SMALL_MANY, _LITELLM, 50.0),
        (GATED, STREAMED, NGINX, 0.95),
        (OPEN, SMALL_MANY, NGINX, 0.35),
        (OPEN, STREAMED, NGINX, 0.9),
        (OPEN, LARGE, NGINX, 0.65),
    ):
        found = results.times(target, other, load)
        yield Goal(f"{target}: {load}", found, limit, at_least=True, unit=f"x {other}")


def _costs(results: Results) -> Iterator[Goal]:
    p50_s = results.median(GATED, SMALL_ONE, lambda cell: cell.p50_s)
    yield Goal(f"{GATED}: {SMALL_ONE}, p50", _scaled(p50_s, MS), 0.25, at_least=False, unit="ms")
    for target in (GATED, OPEN):
        cpu_us = results.median(target, STREAMED, lambda cell: cell.cpu_us)
        name = f"{target}: {STREAMED}, CPU per chunk"
        yield Goal(name, _scaled(cpu_us, 1 / CHUNKS), 30, at_least=False, unit="µs")
    for target, limit in ((GATED, 200), (OPEN, 200), (OPEN_FAST, 260)):
        held = results.rss_bytes.get(target)
        yield Goal(
            f"{target}: memory after all loads", _scaled(held, 1 / MB), limit, at_least=False, unit="MB"
        )


def decision_s(results: Results, target: str, tokens: int, *, cold: bool) -> float | None:
    """CPU time of one turn at a length without what a gated proxy takes for the same bytes, in seconds.

    Below zero where the gated one took more: then the two do not relay alike, and the figure says nothing.
    """
    whole = results.grown(target, tokens, lambda each: each.cold_cpu_s if cold else each.warm_cpu_s)
    relayed = results.grown(GATED, tokens, lambda each: each.cold_cpu_s if cold else each.warm_cpu_s)
    return None if whole is None or relayed is None else whole - relayed


def _conversations(results: Results) -> Iterator[Goal]:
    for target, cold_ms in ((OPEN, 250.0), (OPEN_FAST, 30.0)):
        warm = [decision_s(results, target, tokens, cold=False) for tokens in results.lengths()]
        known = [found for found in warm if found is not None]
        longest = max(results.lengths(), default=0)
        cold_s = decision_s(results, target, longest, cold=True)
        most = max(known) * MS if known else None
        yield Goal(f"{target}: a warm turn, at its worst length", most, 1, at_least=False, unit="ms CPU")
        name = f"{target}: first sight of {longest:,} tokens"
        yield Goal(name, _scaled(cold_s, MS), cold_ms, at_least=False, unit="ms CPU")


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
    rate = results.median(NGINX, SMALL_MANY, lambda cell: cell.rate)
    reach = Goal(f"the load itself: {NGINX}, {SMALL_MANY}", rate, NGINX_RATE, at_least=True, unit="req/s")
    return [reach, *_ratios(results), *_costs(results), *_conversations(results), *_streams(results)]
