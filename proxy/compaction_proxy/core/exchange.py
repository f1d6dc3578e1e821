"""Exchanges: the figures of one request and its response. An exchange holds no text of a conversation."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from compaction_proxy.core.event import (
    SUMMARY_MISSING_REASONS,
    SUMMARY_UNUSABLE_REASONS,
    parse_integer,
    parse_number,
)

FIRST_ERROR_STATUS = 400


class Exchange(NamedTuple):  # not a dataclass, which would take four times as long to create
    """The figures of one request and its response. None means that a figure is unknown.

    For example, the numbers of messages are unknown if the request passed the gate unread.

    Attributes:
        at: Time of the request, in seconds since the epoch.
        model: Name of the model that the client asked for; empty if unknown.
        status: What the proxy did with the request, as in the header `x-compaction-status`.
        code: Status code of the upstream's response; 0 if there was no response.
        request: Id of the request.
        strategy: Name of the strategy whose checkpoint was in force; empty if there was none.
        round: Number of the compaction in force; None if there was none.
        reason: Why the request was forwarded unchanged or without a summary; empty if neither applies.
        request_bytes: Size of the client's request body, in bytes.
        messages_before: Number of messages that the client sent.
        messages_after: Number of messages that were forwarded.
        tokens_before: Calibrated size of the request as the client sent it, in tokens.
        tokens_after: Calibrated size of the request as it was forwarded, in tokens.
        window: Context window of the model, in tokens.
        trigger: T, in tokens.
        prompt_tokens: Input tokens, as the upstream counted them.
        completion_tokens: Output tokens, as the upstream counted them.
        cached_tokens: Input tokens that the upstream had cached.
        overhead_s: Seconds that the proxy spent on the request, not counting the time in which it waited for
            the upstream.
        first_byte_s: Seconds from the start of the forwarded request to the first byte of its response.
        upstream_s: Seconds from the start of the forwarded request to the end of its response.
        recalls: Number of further replies that the model gave after it had searched removed messages; None if
            it did not search.
        recall_prompt_tokens: The part of `prompt_tokens` that belongs to the replies after the first one.
        recall_cached_tokens: The part of `cached_tokens` that belongs to the replies after the first one.
        label: The label that the client gave the request (`x-compaction-label`); empty without one.
        error: What the upstream calls its error, such as `insufficient_quota`; without a response, the cause
            (`core.upstream_failure`). Empty if neither is known.
    """

    at: float
    model: str
    status: str
    code: int = 0
    request: str = ""
    strategy: str = ""
    round: int | None = None
    reason: str = ""
    request_bytes: int = 0
    messages_before: int | None = None
    messages_after: int | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    window: int | None = None
    trigger: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    overhead_s: float = 0.0
    first_byte_s: float | None = None
    upstream_s: float | None = None
    recalls: int | None = None
    recall_prompt_tokens: int | None = None
    recall_cached_tokens: int | None = None
    label: str = ""
    error: str = ""

    @property
    def first_prompt_tokens(self) -> int | None:
        """The upstream's count of input tokens for the first reply; None if unknown.

        Each further reply needs a request of its own, which adds to `prompt_tokens`. So only this count is
        comparable with the estimated size of the client's request.
        """
        if self.recalls is None or self.prompt_tokens is None:
            return self.prompt_tokens
        recall_tokens = self.recall_prompt_tokens
        return None if recall_tokens is None else self.prompt_tokens - recall_tokens

    @property
    def sizes(self) -> tuple[int, int] | None:
        """The tokens that the client sent and those that the upstream read; None if they are unknown.

        The second number is the upstream's own count if there is one, searches included. Otherwise it is the
        estimate, which only a request has that the proxy has read. The first number is the count of what was
        forwarded at first, plus the estimate of what was removed. Both are 0 if the upstream refused the
        request. They are unknown if there was no response.
        """
        code, forwarded, estimate = self.code, self.prompt_tokens, self.tokens_after
        if code >= FIRST_ERROR_STATUS:
            return 0, 0
        if not code:
            return None
        if estimate is None:  # the proxy has not read the request, so it removed nothing
            return (forwarded, forwarded) if forwarded else None
        removed = (self.tokens_before or 0) - estimate  # negative if the proxy has added text
        return max(0, (self.first_prompt_tokens or estimate) + removed), forwarded or estimate

    @property
    def has_failed(self) -> bool:
        """Whether the upstream's response has an error status. A missing response is no error."""
        return self.code >= FIRST_ERROR_STATUS

    @property
    def has_waited_for_round(self) -> bool:
        """Whether the request waited for a compaction: one was made, or its summary did not come or fit."""
        reasons = SUMMARY_MISSING_REASONS | SUMMARY_UNUSABLE_REASONS
        return self.status == "applied" or (
            self.status in {"failed-open", "over-limit"}
            and (self.reason in reasons or self.reason.startswith("http-"))
        )

    @property
    def failure(self) -> str:
        """The error status and what is known of the error, such as `429 insufficient_quota`.

        Without a response, it is the cause, such as `connection-refused`. Empty if the request did not fail.
        """
        return f"{self.code} {self.error}".rstrip() if self.has_failed else self.error


_TEXTS = frozenset({"model", "status", "request", "strategy", "reason", "label", "error"})
_NUMBERS = frozenset({"at", "overhead_s", "first_byte_s", "upstream_s"})


def to_fields(exchange: Exchange) -> dict[str, Any]:
    """Returns the exchange as JSON values by field name, without fields that are None or an empty text."""
    return {name: value for name, value in exchange._asdict().items() if value not in (None, "")}


def from_fields(values: Mapping[str, Any]) -> Exchange | None:
    """Builds an exchange from its fields by name. An invalid field counts as unknown.

    Returns None if the time (`at`) is missing or invalid.
    """
    at = parse_number(values.get("at"))
    if at is None:
        return None
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name in _TEXTS and isinstance(value, str):
            parsed[name] = value
        elif name in _NUMBERS and parse_number(value) is not None:
            parsed[name] = parse_number(value)
        elif name in Exchange._fields and name not in _TEXTS | _NUMBERS and parse_integer(value) is not None:
            parsed[name] = value
    return Exchange(**{"model": "", "status": "", **parsed, "at": at})
