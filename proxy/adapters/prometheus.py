"""Metrics for Prometheus: counted from exchanges and events, and written out when somebody asks.

Several workers keep their figures in files of one folder, each in files of its own, named by the worker's
number: whoever is asked adds them up, and a worker that takes another's place counts on from where it ended.
"""

import asyncio
import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics, values
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.openmetrics import exposition as openmetrics

from proxy.adapters.prometheus_families import families
from proxy.core.alike import Alike
from proxy.core.economics import Saving
from proxy.core.event import COMPACTED, FAILED, FAILURES, Event
from proxy.core.exchange import Exchange

# Where the library looks for the folder of several workers.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# Of what clients choose so many values become labels, each cut to so many characters.
MAX_NAMES = 100
MAX_NAME_CHARACTERS = 100
OTHER, UNKNOWN = "other", "unknown"
# A conversation is active for this long after a request, in seconds; so many are remembered.
ACTIVE_S = 300.0
MAX_ACTIVE = 100_000
# How often gauges are brought up to date, in seconds.
FRESH_S = 5.0
_FIRST_ERROR = 400

# One process holds its figures in memory, whatever the environment says; `share` is for several.
values.ValueClass = values.MutexValue
# When a counter began is of no use to anybody here, and would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Heard(NamedTuple):
    """An exchange that is to be counted; the conversation is its id, None: it is not known."""

    conversation: str | None
    exchange: Exchange
    saving: Saving | None


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
        self._models, self._reasons = Names(), Names()
        # Conversations, the one that was heard of last at the end: when, and the form of its last request.
        self._active: dict[str, tuple[float, tuple[str, int | None]]] = {}
        self.breakers: dict[str, Callable[[], bool]] = {}
        self._gauges["build_info"].labels(version).set(1)
        self.reloaded(taken=True)

    def exchanges(self, heard: Iterable[Heard]) -> None:
        """Count exchanges, oldest first; many are alike, and counted together."""
        alike: defaultdict[tuple[str, str, int], list[Heard]] = defaultdict(list)
        stable: list[float] = []
        for each in heard:
            alike[each.exchange.model, each.exchange.status, each.exchange.code].append(each)
            if each.conversation is not None:
                stable += self._stability(each.conversation, each.exchange)
        for (name, status, code), group in alike.items():
            model = self._models.label(name, new=0 < code < _FIRST_ERROR)
            exchanges = [each.exchange for each in group]
            self._count("compaction_requests_total", len(group), model, status)
            self._add_times(model, code, exchanges)
            self._add_usage(model, exchanges)
            self._add_sizes(model, [each for each in exchanges if each.tokens_after is not None])
            self._add_savings(model, [each.saving for each in group])
        self._observe("compaction_prefix_stable_ratio", stable)

    def alike(self, alike: Alike) -> None:
        """Count exchanges that were not read."""
        exchanges, code = alike.exchanges, alike.code
        model = self._models.label(alike.model, new=0 < code < _FIRST_ERROR)
        self._count("compaction_requests_total", len(exchanges), model, exchanges[0].status)
        self._add_times(model, code, exchanges)
        self._count("compaction_input_tokens_total", alike.prompt_tokens, model)
        self._count("compaction_cached_input_tokens_total", alike.cached_tokens, model)
        self._count("compaction_output_tokens_total", alike.completion_tokens, model)
        self._count("compaction_requests_unpriced_total", len(exchanges) - alike.priced, model)
        self._count("compaction_requests_cost_usd_total", alike.cost_usd, model)
        if alike.conversation is not None:  # all of them have one form
            stable = [*self._stability(alike.conversation, exchanges[0]), *[1.0] * (len(exchanges) - 1)]
            self._observe("compaction_prefix_stable_ratio", stable)

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

    def _stability(self, conversation: str, exchange: Exchange) -> tuple[float, ...]:
        """1 if a request went on in the form of the one before it, else 0; nothing if that is unknown."""
        form = exchange.strategy, exchange.round
        before = self._active.pop(conversation, None)
        self._active[conversation] = self._clock(), form
        if len(self._active) > MAX_ACTIVE:
            del self._active[next(iter(self._active))]
        return () if before is None else (float(before[1] == form),)

    def _add_times(self, model: str, code: int, exchanges: Sequence[Exchange]) -> None:
        self._observe("compaction_overhead_seconds", [each.overhead_s for each in exchanges])
        first = [each.first_byte_s for each in exchanges if each.first_byte_s is not None]
        self._observe("upstream_time_to_first_chunk_seconds", first, model)
        whole = [each.upstream_s for each in exchanges if each.upstream_s is not None]
        self._observe("upstream_request_duration_seconds", whole, model, str(code or "none"))

    def _add_usage(self, model: str, exchanges: list[Exchange]) -> None:
        told = [each for each in exchanges if each.prompt_tokens is not None]
        self._count("compaction_input_tokens_total", sum(each.prompt_tokens or 0 for each in told), model)
        cached = sum(each.cached_tokens or 0 for each in told)
        self._count("compaction_cached_input_tokens_total", cached, model)
        output = sum(each.completion_tokens or 0 for each in told)
        self._count("compaction_output_tokens_total", output, model)

    def _add_sizes(self, model: str, counted: list[Exchange]) -> None:
        """Of requests that were counted."""
        sizes = [(each.tokens_before or 0, each.tokens_after or 0) for each in counted]
        self._count("compaction_tokens_before_total", sum(before for before, _ in sizes), model)
        self._count("compaction_tokens_after_total", sum(after for _, after in sizes), model)
        self._count(
            "compaction_tokens_removed_total", sum(max(pair[0] - pair[1], 0) for pair in sizes), model
        )
        used = [(each.tokens_after or 0) / each.window for each in counted if each.window]
        self._observe("compaction_context_used_ratio", used)
        off = [
            abs((each.tokens_after or 0) / real - 1) for each in counted if (real := each.first_prompt_tokens)
        ]
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

    def _observe(self, name: str, amounts: list[float], *labels: str) -> None:
        if amounts:
            histogram = self._histograms[name]
            _observe_all(histogram.labels(*labels) if labels else histogram, amounts)


def _observe_all(child: Histogram, amounts: list[float]) -> None:
    """Observe many amounts at once, which the library offers one by one at ten times the price."""
    bounds: list[float] = child._upper_bounds  # noqa: SLF001 - a test compares this with `observe`
    for index, count in Counter(map(partial(bisect_left, bounds), amounts)).items():
        child._buckets[index].inc(count)  # noqa: SLF001
    child._sum.inc(sum(amounts))  # noqa: SLF001
