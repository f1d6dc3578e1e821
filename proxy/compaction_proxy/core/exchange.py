"""Exchanges: one request of a client and its answer, as figures. No text of a conversation is among them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from compaction_proxy.core.event import parse_integer, parse_number

# Status codes from which on an answer is an error.
FIRST_ERROR_STATUS = 400
# The status of a request that passed the gate, or was read and left as it was.
NOTHING_DONE = "none"


class Exchange(NamedTuple):  # made for each request: a dataclass costs four times as much
    """One request and its answer. None means that it is not known: an unread request was not counted.

    Attributes:
        at: When the request came, in seconds since the epoch.
        model: The model that was asked; empty if that is not known.
        status: What was done to the request, as the header `x-compaction-status` says it.
        code: The upstream's status code; 0 if there was no answer.
        request: The request's id.
        strategy: Whose checkpoint was in force; empty: none.
        round: Its number; None: none.
        reason: Why not more was done; empty: there is nothing to say.
        request_bytes: Of the client's body.
        messages_before: Messages that the client sent.
        messages_after: Messages that were forwarded.
        tokens_before: Tokens that the client sent, calibrated.
        tokens_after: Tokens that were forwarded, calibrated.
        window: Of the model, in tokens.
        trigger: T, in tokens.
        prompt_tokens: Input tokens, as the upstream counted them.
        completion_tokens: Output tokens, likewise.
        cached_tokens: Input tokens that the upstream had cached.
        overhead_s: Seconds that the request took beside waiting for the upstream.
        first_byte_s: Seconds from asking the upstream to the first byte of its answer.
        upstream_s: Seconds from asking the upstream to the end of its answer.
        recalls: How often the answer went on because the model searched what was removed; None: never.
        recall_prompt_tokens: Of the input tokens, those that the answers after the first one took.
        recall_cached_tokens: Of the cached ones, likewise.
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

    @property
    def first_prompt_tokens(self) -> int | None:
        """Input tokens of the first answer, as the upstream counted them: the request as it was sized."""
        if self.recalls is None or self.prompt_tokens is None:
            return self.prompt_tokens
        more = self.recall_prompt_tokens
        return None if more is None else self.prompt_tokens - more

    @property
    def has_failed(self) -> bool:
        """Whether the upstream answered with an error; no answer at all is none."""
        return self.code >= FIRST_ERROR_STATUS


class UnreadExchange(NamedTuple):  # made for each request, at a third of the price of an exchange
    """What is known of an exchange whose request was not read, beside its model and status code.

    Attributes:
        at: See `Exchange`, as for the others.
        request: The request's id.
        request_bytes: Of the body.
        prompt_tokens: Input tokens.
        completion_tokens: Output tokens.
        cached_tokens: Of the input.
        overhead_s: What it took beside the upstream.
        first_byte_s: Until the upstream began to answer.
        upstream_s: Until it had answered.
    """

    at: float
    request: str
    request_bytes: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    overhead_s: float
    first_byte_s: float | None
    upstream_s: float | None


_UNKNOWN = (None,) * 6
_NO_RECALLS = (None,) * 3


def build_unread_exchange(model: str, code: int, unread: UnreadExchange) -> Exchange:
    """The exchange with a model and a status code, of which no more is known than this."""
    at, request, request_bytes, *rest = unread
    told = (at, model, NOTHING_DONE, code, request, "", None, "", request_bytes)
    return Exchange._make((*told, *_UNKNOWN, *rest, *_NO_RECALLS))


_TEXTS = frozenset({"model", "status", "request", "strategy", "reason"})
_NUMBERS = frozenset({"at", "overhead_s", "first_byte_s", "upstream_s"})


def to_fields(exchange: Exchange) -> dict[str, Any]:
    """The exchange as JSON values, without what is unknown."""
    return {name: value for name, value in exchange._asdict().items() if value not in (None, "")}


def from_fields(values: Mapping[str, Any]) -> Exchange | None:
    """The exchange that these fields tell of, or None if they do not say when it was."""
    at = parse_number(values.get("at"))
    if at is None:
        return None
    read: dict[str, Any] = {}
    for name, value in values.items():
        if name in _TEXTS and isinstance(value, str):
            read[name] = value
        elif name in _NUMBERS and parse_number(value) is not None:
            read[name] = parse_number(value)
        elif name in Exchange._fields and name not in _TEXTS | _NUMBERS and parse_integer(value) is not None:
            read[name] = value
    return Exchange(**{"model": "", "status": "", **read, "at": at})
