"""Every metric there is: its name, kind, labels, buckets, and what it says.

Names, units and labels are a contract with dashboards and alerts. No label may take as many values as there
are conversations, tenants or keys; what clients choose freely, such as a model's name, is bounded before it
becomes one.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from compaction_proxy.telemetry.counters import OVERHEAD_BOUNDS_S

# Upper bounds of buckets: seconds, or shares.
STORE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 10)
SUMMARY_S = (0.5, 1, 2, 5, 10, 20, 30, 60, 120)
UPSTREAM_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600)
FIRST_CHUNK_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
SIZE_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
USED_SHARES = (0.1, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1)
ERROR_SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
STABLE_SHARES = (0, 1)


class Counted(NamedTuple):
    """A counter: what it says, and its labels."""

    says: str
    labels: tuple[str, ...] = ()


class Observed(NamedTuple):
    """A histogram: what it says, upper bounds of its buckets, and its labels."""

    says: str
    buckets: tuple[float, ...]
    labels: tuple[str, ...] = ()


class Shown(NamedTuple):
    """A gauge: what it says, its labels, and how those of several workers are made one.

    Those of workers that have ended do not count (`live`).
    """

    says: str
    labels: tuple[str, ...]
    among_workers: Literal["livesum", "livemax", "livemin"]


COUNTERS: Mapping[str, Counted] = {
    "compaction_requests_total": Counted(
        "Requests on compacted paths, by what was done to them.", ("model", "status")
    ),
    "compaction_runs_total": Counted(
        "Rounds that were made, or were due and failed.", ("strategy", "trigger", "outcome")
    ),
    "compaction_failures_total": Counted(
        "Times that something should have been made shorter, and was not.", ("reason",)
    ),
    "compaction_tokens_before_total": Counted(
        "Tokens that clients sent, of requests that were counted.", ("model",)
    ),
    "compaction_tokens_after_total": Counted("Tokens that were forwarded of the same requests.", ("model",)),
    "compaction_tokens_removed_total": Counted("Tokens that were sent and not forwarded.", ("model",)),
    "compaction_input_tokens_total": Counted("Input tokens, as the upstream counted them.", ("model",)),
    "compaction_cached_input_tokens_total": Counted("Input tokens that the upstream had cached.", ("model",)),
    "compaction_output_tokens_total": Counted("Output tokens, as the upstream counted them.", ("model",)),
    "compaction_summary_tokens_total": Counted("Tokens of summary calls.", ("direction",)),
    "compaction_summary_cost_usd_total": Counted("Dollars paid for summaries."),
    "compaction_saved_cost_usd_total": Counted(
        "Dollars that requests would have cost more, had everything been forwarded that clients sent."
    ),
    "compaction_cache_loss_cost_usd_total": Counted(
        "Dollars paid because rounds changed what the upstream had cached."
    ),
    "compaction_requests_cost_usd_total": Counted(
        "Dollars paid for requests, summaries not among them.", ("model",)
    ),
    "compaction_requests_unpriced_total": Counted("Requests that no price is known for.", ("model",)),
    "compaction_recall_searches_total": Counted(
        "Searches among what rounds have taken out.", ("source", "outcome")
    ),
    "upstream_errors_total": Counted(
        "Requests to an upstream that got no whole answer, or one with an error status.", ("target", "cause")
    ),
    "store_errors_total": Counted("Calls of the store that failed.", ("reason",)),
}

HISTOGRAMS: Mapping[str, Observed] = {
    "compaction_ratio": Observed("Size of a request after a round, as a share of before.", SIZE_SHARES),
    "compaction_summary_duration_seconds": Observed(
        "How long rounds took that asked a summary model.", SUMMARY_S
    ),
    "compaction_overhead_seconds": Observed(
        "What a request took beside waiting for the upstream.", OVERHEAD_BOUNDS_S
    ),
    "compaction_context_used_ratio": Observed(
        "Tokens that were forwarded, as a share of the model's window.", USED_SHARES
    ),
    "compaction_token_estimate_error_ratio": Observed(
        "How far an estimate was off, up or down, as a share of what the upstream counted.", ERROR_SHARES
    ),
    "compaction_prefix_stable_ratio": Observed(
        "1 where a conversation's request went on in the form of the one before, 0 where a round changed it.",
        STABLE_SHARES,
    ),
    "store_operation_duration_seconds": Observed("How long calls of the store took.", STORE_S, ("op",)),
    "upstream_request_duration_seconds": Observed(
        "From asking the upstream to the end of its answer.", UPSTREAM_S, ("model", "code")
    ),
    "upstream_time_to_first_chunk_seconds": Observed(
        "From asking the upstream to the first byte of its answer.", FIRST_CHUNK_S, ("model",)
    ),
}

GAUGES: Mapping[str, Shown] = {
    "compaction_sessions_active": Shown(
        "Conversations that have had a request in the last five minutes.", (), "livesum"
    ),
    "inflight_body_bytes": Shown("Bytes of request bodies that are held now.", (), "livesum"),
    "inflight_body_limit_bytes": Shown(
        "Bytes of request bodies that may be held (server.max_inflight_bytes).", (), "livesum"
    ),
    "circuit_breaker_state": Shown(
        "0 while a target is used, 1 while it is left alone because it failed.", ("target",), "livemax"
    ),
    "config_last_reload_successful": Shown(
        "1 if the configuration was taken when it was last read, 0 if it was refused.", (), "livemin"
    ),
    "config_last_reload_success_timestamp_seconds": Shown(
        "When a configuration was last taken, in seconds since the epoch.", (), "livemin"
    ),
    "build_info": Shown("Always 1; the label says what runs.", ("version",), "livemax"),
}


class Families(NamedTuple):
    """The metrics of one process, by name."""

    counters: Mapping[str, Counter]
    histograms: Mapping[str, Histogram]
    gauges: Mapping[str, Gauge]


def families(registry: CollectorRegistry) -> Families:
    """All metrics, registered."""
    return Families(
        {name: Counter(name, it.says, it.labels, registry=registry) for name, it in COUNTERS.items()},
        {
            name: Histogram(name, it.says, it.labels, buckets=it.buckets, registry=registry)
            for name, it in HISTOGRAMS.items()
        },
        {
            name: Gauge(name, it.says, it.labels, multiprocess_mode=it.among_workers, registry=registry)
            for name, it in GAUGES.items()
        },
    )
