"""Reasons: the short words that say why a round was due, or why none was made.

They stand in events, in the header `x-compaction-reason` and in metrics. A test finds whatever is raised with
another word, because people would read it without an explanation.
"""

from compaction_proxy.core.trigger import FIELDS

# What makes a round due: a field of a trigger row, or one of these.
DUE = frozenset({
    *FIELDS,
    "force",  # it was asked for
    "huge",  # a new result is so large that it is shortened by itself
    "limit",  # the request would not fit otherwise
    "output",  # the upstream would refuse it together with the output that it asks for
    "overflow",  # the upstream has refused it as too long
    "soft",  # the trigger is near, and nobody waits
})  # fmt: skip

# Bodies that go on as they came, because they are not read.
UNREAD = frozenset({
    "duplicate-keys", "encoded", "no-array", "no-messages", "not-json", "provider-compacts",
    "stateful", "too-deep", "too-many",
})  # fmt: skip
# Requests in which rounds would do no good, or do none for now.
LEFT = frozenset({"irreducible", "nothing-to-take", "paused"})
# Nobody to ask for a summary, or nobody who may or can be asked for this one.
UNASKED = frozenset({
    "breaker-open", "budget", "no-model", "no-summary-model", "overflow", "summary-window", "unknown-model",
})  # fmt: skip
# Summaries that did not come.
MISSED = frozenset({"cancelled", "deadline", "internal", "timeout", "unreachable"})
# Summaries that came and cannot be used.
UNUSABLE = frozenset({
    "content-filter", "empty", "garbage", "language", "longer", "reasoning", "refused", "rules-lost",
    "too-short", "tool-calls", "truncated", "unfaithful",
})  # fmt: skip

# Why a request went on as it came, or without a summary.
REASONS = UNREAD | LEFT | UNASKED | MISSED | UNUSABLE
# These begin with one of the following: the status of the summary model, a trouble of the store.
FAMILIES = ("http-", "store-")


def known(reason: str) -> bool:
    """Whether this is one of the words for why no round was made."""
    return reason in REASONS or reason.startswith(FAMILIES)
