"""Metrics for Prometheus: counted from exchanges and events, and written out when somebody asks.

Several workers keep their figures in files of one folder, each in files of its own, named by the worker's
number: whoever is asked adds them up, and a worker that takes another's place counts on from where it ended.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics, values
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.openmetrics import exposition as openmetrics

from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.event import COMPACTED, FAILED, FAILURES, Event
from compaction_proxy.core.exchange import FAILED_FROM, NOTHING_DONE, Exchange
from compaction_proxy.telemetry.counters import buckets
from compaction_proxy.telemetry.entry import Entry
from compaction_proxy.telemetry.exchange_batch import Alike
from compaction_proxy.telemetry.metric_families import families

# Where the library looks for the folder of several workers.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# Of what clients choose so many values become labels, each cut to so many characters.
MAX_NAMES = 100
MAX_NAME_CHARACTERS = 100
OTHER, UNKNOWN = "other", "unknown"
# A conversation is active for this long after a request, in seconds; so many are remembered.
ACTIVE_S = 300.0
MAX_ACTIVE = 100_000
# What had been made of a conversation: the strategy and the number of the round; of most, nothing.
_Form = tuple[str, int | None]
_PLAIN: _Form = ("", None)
# How often gauges are brought up to date, in seconds.
FRESH_S = 5.0

# One process holds its figures in memory, whatever the environment says; `share` is for several.
values.ValueClass = values.MutexValue
# When a counter began is of no use to anybody here, and would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]


def share(folder: str, worker: int) -> None:
    """Keep the figures of this process in a folder that several share. To be called before all else.

    Args:
        folder: Where; one for all workers of a proxy.
        worker: The number of this one. Of processes that run at the same time no two may have the same.
    """
    os.environ[FOLDER_VARIABLE] = folder
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]


def forget(folder: str, worker: int) -> None:
    """Drop what was true of a worker only while it lived; what it has counted stays."""
    mark_process_dead(worker, folder)  # type: ignore[no-untyped-call]


class Names:
    """The values of a label that others choose: the first 100 stay what they are, all more are `other`."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def label(self, name: str, *, new: bool = True) -> str:
        """The value for a name; one that is not known yet is taken in only if it is `new`."""
        known = self._known.get(name)
        if known is not None:
            return known
        if not name:
            return UNKNOWN
        if not new or len(self._known) >= MAX_NAMES:
            return OTHER
        shown = "".join(each if each.isprintable() else "?" for each in name[:MAX_NAME_CHARACTERS])
        return self._known.setdefault(name, shown)


class Metrics:
    """The metrics of this process, and of the other workers if there are any.

    Args:
        version: Our version.
        clock: Monotonic seconds.
        now: Seconds since the epoch.

    Attributes:
        breakers: What may be left alone because it fails: for each target, whether it is now.
        figures: Gauges without labels that are read when they are needed: for each name, its figure now.
    """

    def __init__(
        self,
        version: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._now = now
        self._folder = os.environ.get(FOLDER_VARIABLE) if values.ValueClass is not values.MutexValue else None
        self._registry = CollectorRegistry()
        self._counters, self._histograms, self._gauges = families(self._registry)
        if self._folder is None:
            ProcessCollector(
                registry=self._registry
            )  # of several workers it would show the one that is asked
        self._models, self._reasons, self._targets = Names(), Names(), Names()
        # Conversations, the one that was heard of last at the end: when, and the form of its last request.
        self._active: dict[str, tuple[float, _Form]] = {}
        self.breakers: dict[str, Callable[[], bool]] = {}
        self.figures: dict[str, Callable[[], float]] = {}
        self._gauges["build_info"].labels(version).set(1)
        self.reloaded(taken=True)

    def exchanges(self, entries: Iterable[Entry]) -> None:
        """Count exchanges, oldest first; many are alike, and counted together."""
        alike: defaultdict[tuple[str, str, int], list[Entry]] = defaultdict(list)
        stable: list[float] = []
        now = self._clock()
        for each in entries:
            exchange = each.exchange
            alike[exchange.model, exchange.status, exchange.code].append(each)
            if each.conversation is not None:
                stable += self._stability(each.conversation, (exchange.strategy, exchange.round), now)
        for (name, status, code), group in alike.items():
            model = self._models.label(name, new=0 < code < FAILED_FROM)
            columns: Any = Exchange._make(zip(*[each.exchange for each in group], strict=True))
            self._count("compaction_requests_total", len(group), model, status)
            self._add_times(model, code, columns)
            self._add_usage(model, columns)
            self._add_sizes(model, columns)
            self._add_savings(model, [each.saving for each in group])
        self._observe("compaction_prefix_stable_ratio", stable)

    def alike(self, alike: Alike) -> None:
        """Count exchanges that were not read."""
        count, code = len(alike.exchanges), alike.code
        model = self._models.label(alike.model, new=0 < code < FAILED_FROM)
        self._count("compaction_requests_total", count, model, NOTHING_DONE)
        self._add_times(model, code, alike.columns)
        self._count("compaction_input_tokens_total", alike.prompt_tokens, model)
        self._count("compaction_cached_input_tokens_total", alike.cached_tokens, model)
        self._count("compaction_output_tokens_total", alike.completion_tokens, model)
        self._count("compaction_requests_unpriced_total", count - alike.priced, model)
        self._count("compaction_requests_cost_usd_total", alike.cost_usd, model)
        if alike.conversation is not None:  # all of them have one form
            stable = self._stability(alike.conversation, _PLAIN, self._clock())
            self._observe("compaction_prefix_stable_ratio", [*stable, *[1.0] * (count - 1)])

    def event(self, _tenant: str, event: Event) -> None:
        """Count what was decided, or has failed."""
        if event.kind in FAILURES:
            self._count("compaction_failures_total", 1, self._reasons.label(event.reason))
        if event.kind in {COMPACTED, FAILED}:
            self._round(event)

    def store_took(self, operation: str, seconds: float) -> None:
        """A call of the store has ended, one way or another."""
        self._histograms["store_operation_duration_seconds"].labels(operation).observe(seconds)

    def store_failed(self, reason: str) -> None:
        """A call of the store has failed."""
        self._count("store_errors_total", 1, self._reasons.label(reason))

    def count_upstream_error(self, target: str, cause: str) -> None:
        """Count an answer of an upstream that failed or has an error status; the cause is a word of ours."""
        self._count("upstream_errors_total", 1, self._targets.label(target), cause)

    def searched(self, source: str, outcome: str) -> None:
        """Somebody has searched among what rounds have taken out; both are words of ours."""
        self._count("compaction_recall_searches_total", 1, source, outcome)

    def reloaded(self, *, taken: bool) -> None:
        """A configuration was read, and taken or refused."""
        self._gauges["config_last_reload_successful"].set(int(taken))
        if taken:
            self._gauges["config_last_reload_success_timestamp_seconds"].set(self._now())

    def refresh(self) -> None:
        """Bring up to date what changes without anything happening."""
        too_old = self._clock() - ACTIVE_S
        while self._active and next(iter(self._active.values()))[0] < too_old:
            del self._active[next(iter(self._active))]
        self._gauges["compaction_sessions_active"].set(len(self._active))
        for name, figure in self.figures.items():
            self._gauges[name].set(figure())
        for target, resting in self.breakers.items():
            self._gauges["circuit_breaker_state"].labels(target).set(int(resting()))

    async def keep_fresh(self) -> None:
        """Bring gauges up to date every few seconds, until cancelled: of several workers one is asked."""
        while True:
            self.refresh()
            await asyncio.sleep(FRESH_S)

    async def written(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics in the form that `accept`, a header's value, prefers, and its content type."""
        self.refresh()
        return await asyncio.to_thread(self._written, "application/openmetrics-text" in accept)

    def _written(self, open_metrics: bool) -> tuple[bytes, str]:  # noqa: FBT001 - there is one caller
        registry = self._registry
        if self._folder is not None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry, self._folder)  # type: ignore[no-untyped-call]
        if open_metrics:
            text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4

    def _round(self, event: Event) -> None:
        """A round that was made, or was due."""
        made = event.kind == COMPACTED
        trigger = event.reason.partition(",")[0] if made else ""  # else the reason says why it failed
        outcome = event.outcome if made else FAILED
        labels = event.strategy, self._reasons.label(trigger), outcome
        self._count("compaction_runs_total", 1, *labels)
        if made and event.tokens_before and event.tokens_after is not None:
            self._observe("compaction_ratio", [event.tokens_after / event.tokens_before])
        if event.calls and event.seconds is not None:
            self._observe("compaction_summary_duration_seconds", [event.seconds])
        self._count("compaction_summary_tokens_total", event.prompt_tokens or 0, "input")
        self._count("compaction_summary_tokens_total", event.completion_tokens or 0, "output")
        self._count("compaction_summary_cost_usd_total", event.cost_usd or 0)

    def _stability(self, conversation: str, form: _Form, now: float) -> tuple[float, ...]:
        """1 if a request went on in the form of the one before it, else 0; nothing if that is unknown."""
        before = self._active.pop(conversation, None)
        self._active[conversation] = now, form
        if len(self._active) > MAX_ACTIVE:
            del self._active[next(iter(self._active))]
        return () if before is None else (float(before[1] == form),)

    def _add_times(self, model: str, code: int, columns: Any) -> None:  # noqa: ANN401 - columns of several kinds
        self._observe("compaction_overhead_seconds", columns.overhead_s)
        self._observe("upstream_time_to_first_chunk_seconds", _known(columns.first_byte_s), model)
        whole = _known(columns.upstream_s)
        self._observe("upstream_request_duration_seconds", whole, model, str(code or "none"))

    def _add_usage(self, model: str, columns: Any) -> None:  # noqa: ANN401
        self._count("compaction_input_tokens_total", sum(filter(None, columns.prompt_tokens)), model)
        cached = sum(filter(None, columns.cached_tokens))
        self._count("compaction_cached_input_tokens_total", cached, model)
        output = sum(filter(None, columns.completion_tokens))
        self._count("compaction_output_tokens_total", output, model)

    def _add_sizes(self, model: str, columns: Any) -> None:  # noqa: ANN401
        """Of requests that were counted."""
        after = columns.tokens_after
        if not any(after):
            return
        sizes = [pair for pair in zip(columns.tokens_before, after, strict=True) if None not in pair]
        self._count("compaction_tokens_before_total", sum([sent for sent, _ in sizes]), model)
        self._count("compaction_tokens_after_total", sum([left for _, left in sizes]), model)
        removed = sum([sent - left for sent, left in sizes if sent > left])
        self._count("compaction_tokens_removed_total", removed, model)
        used = [left / window for left, window in zip(after, columns.window, strict=True) if left and window]
        self._observe("compaction_context_used_ratio", used)
        real = zip(after, _first_prompts(columns), strict=True)
        off = [abs(left / counted - 1) for left, counted in real if left and counted]
        self._observe("compaction_token_estimate_error_ratio", off)

    def _add_savings(self, model: str, savings: list[Saving | None]) -> None:
        known = [each for each in savings if each is not None]
        self._count("compaction_requests_unpriced_total", len(savings) - len(known), model)
        self._count("compaction_requests_cost_usd_total", sum(max(each.cost, 0) for each in known), model)
        self._count("compaction_saved_cost_usd_total", sum(max(each.gross, 0) for each in known))
        self._count("compaction_cache_loss_cost_usd_total", sum(max(each.cache_loss, 0) for each in known))

    def _count(self, name: str, amount: float, *labels: str) -> None:
        if amount:  # else there would be series of nothing
            counter = self._counters[name]
            (counter.labels(*labels) if labels else counter).inc(amount)

    def _observe(self, name: str, amounts: Sequence[float], *labels: str) -> None:
        if amounts:
            histogram = self._histograms[name]
            _observe_all(histogram.labels(*labels) if labels else histogram, amounts)


def _first_prompts(columns: Any) -> Sequence[int | None]:  # noqa: ANN401
    """What upstreams counted of what was sized: of an answer that went on, its beginning."""
    if not any(columns.recall_prompt_tokens):
        told: Sequence[int | None] = columns.prompt_tokens
        return told
    return [each.first_prompt_tokens for each in map(Exchange._make, zip(*columns, strict=True))]


def _known(column: Sequence[float | None]) -> list[float]:
    return [each for each in column if each is not None]


def _observe_all(child: Histogram, amounts: Sequence[float]) -> None:
    """Observe many amounts at once, which the library offers one by one at ten times the price."""
    bounds: list[float] = child._upper_bounds  # noqa: SLF001 - a test compares this with `observe`
    for bucket, count in zip(child._buckets, buckets(amounts, bounds), strict=False):  # noqa: SLF001
        if count:
            bucket.inc(count)
    child._sum.inc(sum(amounts))  # noqa: SLF001
