"""Parses the `x-compaction*` headers of requests, and builds the `x-compaction*` headers of responses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from compaction_proxy.compaction.directives import MAX_PIN_CHARACTERS, MAX_PINS, parse_pin
from compaction_proxy.compaction.types import CompactionMode, CompactionReport, CompactionStatus
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.event import SMALL
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.headers import Headers, build_header_map

PIN_HEADER = b"x-compaction-pin"
LABEL_HEADER = b"x-compaction-label"
MAX_LABEL_CHARACTERS = 64
_REQUESTABLE_MODES = {
    mode.value: mode for mode in (CompactionMode.FORCE, CompactionMode.BYPASS, CompactionMode.SHADOW)
}
_TRIGGER = re.compile(r"0{0,9}[1-9][0-9]{0,8}")
# The request headers with which a client controls the proxy for one request.
CONTROL_FIELDS = frozenset(
    {b"x-compaction", b"x-compaction-strategy", b"x-compaction-trigger-tokens", PIN_HEADER, LABEL_HEADER}
)
# The header fields in which SDKs say how many seconds they wait for a response.
_TIMEOUT_FIELDS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
# The proxy's own response headers for a request that it has forwarded without parsing it. If the conversation
# is known, `build_unread_headers` adds its id.
UNREAD_HEADERS: Headers = [
    (b"x-compaction-status", CompactionStatus.NONE.value.encode()),
    (b"x-compaction-reason", SMALL.encode()),
]
_SESSION_HEADER = b"x-compaction-session"


@dataclass(frozen=True, slots=True)
class ControlHeaders:
    """The values of a request's `x-compaction*` headers, and the timeout that the client's SDK names.

    Attributes:
        mode: How to treat the request; None selects the configured mode.
        trigger_tokens: The trigger, in tokens; it has an effect only if it is lower than the configured one.
            None selects the configured one.
        strategy: The strategy to use; None selects the configured one.
        patience_s: Seconds after which the client stops waiting for the response; None if it is unknown.
        pins: Texts to keep word for word.
        label: A text by which people find the request and its conversation in lists; empty without one.
    """

    mode: CompactionMode | None = None
    trigger_tokens: int | None = None
    strategy: str | None = None
    patience_s: float | None = None
    pins: tuple[str, ...] = ()
    label: str = ""

    @property
    def has_overrides(self) -> bool:
        """Whether the request overrides the configuration. A label does not."""
        return any((self.mode, self.trigger_tokens, self.strategy, self.pins))


def _build_header_error(name: str, requirement: str) -> RequestRefusedError:
    return RequestRefusedError(400, f"The header {name} {requirement}.", "invalid_compaction_header")


def parse_control_headers(headers: Sequence[tuple[bytes, bytes]]) -> ControlHeaders:
    """Parses the headers with which a client controls compaction, and the timeout that its SDK names.

    Raises:
        RequestRefusedError: With status 400 if a header has an invalid value.
    """
    first = build_header_map(headers)
    mode = _read_field(first, b"x-compaction")
    if mode is not None and mode not in _REQUESTABLE_MODES:
        raise _build_header_error("x-compaction", "must be force, bypass or shadow")
    strategy = _read_field(first, b"x-compaction-strategy")
    if strategy is not None and strategy not in STRATEGIES:
        names = ", ".join(sorted(STRATEGIES))
        raise _build_header_error("x-compaction-strategy", f"must be one of {names}")
    tokens = _read_field(first, b"x-compaction-trigger-tokens")
    if tokens is not None and not _TRIGGER.fullmatch(tokens):
        raise _build_header_error("x-compaction-trigger-tokens", "must be a whole number of tokens above 0")
    return ControlHeaders(
        mode=_REQUESTABLE_MODES[mode] if mode else None,
        trigger_tokens=int(tokens) if tokens else None,
        strategy=strategy,
        patience_s=_parse_patience(first),
        pins=parse_pins(headers) if PIN_HEADER in first else (),
        label=_parse_label(first[LABEL_HEADER]) if LABEL_HEADER in first else "",
    )


def _read_field(header_map: Mapping[bytes, bytes], name: bytes) -> str | None:
    """Returns the value of a header field, converted to lower case; None if there is no such field."""
    return header_map[name].decode("latin-1").strip().lower() if name in header_map else None


def _parse_patience(header_map: Mapping[bytes, bytes]) -> float | None:
    for name in _TIMEOUT_FIELDS:
        try:
            seconds = float(_read_field(header_map, name) or 0)
        except ValueError:
            continue
        if 0 < seconds < 86_400:
            return seconds
    return None


def parse_pins(headers: Sequence[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """Returns the pins of a request in their order, without duplicates.

    `headers` are the header fields of the request, with names in lower case.

    Raises:
        RequestRefusedError: With status 400 if a pin is empty, too long, holds a control character or is not
            UTF-8, or if there are more pins than one conversation may have.
    """
    pins = tuple(dict.fromkeys(_parse_pin(value) for name, value in headers if name == PIN_HEADER))
    if len(pins) > MAX_PINS:
        raise _build_header_error("x-compaction-pin", f"can appear at most {MAX_PINS} times")
    return pins


def _parse_pin(value: bytes) -> str:
    try:
        pin = parse_pin(unquote_to_bytes(value).decode("utf-8"))
    except UnicodeDecodeError:
        requirement = "must be UTF-8, or percent-encoded UTF-8"
        raise _build_header_error("x-compaction-pin", requirement) from None
    if pin is None:
        requirement = f"must have 1 to {MAX_PIN_CHARACTERS} characters without control characters"
        raise _build_header_error("x-compaction-pin", requirement)
    return pin


def _parse_label(value: bytes) -> str:
    try:
        label = unquote_to_bytes(value).decode("utf-8").strip()
    except UnicodeDecodeError:
        requirement = "must be UTF-8, or percent-encoded UTF-8"
        raise _build_header_error("x-compaction-label", requirement) from None
    if not 1 <= len(label) <= MAX_LABEL_CHARACTERS or not label.isprintable():
        requirement = f"must have 1 to {MAX_LABEL_CHARACTERS} printable characters"
        raise _build_header_error("x-compaction-label", requirement)
    return label


def choose_stricter_mode(configured: CompactionMode, requested: CompactionMode | None) -> CompactionMode:
    """Returns the mode for a request: the requested one, unless the configured mode forbids it.

    A request cannot override `bypass`, and cannot force a compaction if `shadow` is configured.
    """
    if requested is None or configured is CompactionMode.BYPASS:
        return configured
    return (
        CompactionMode.SHADOW
        if configured is CompactionMode.SHADOW and requested is CompactionMode.FORCE
        else requested
    )


def build_unread_headers(conversation: str | None) -> Headers:
    """Returns the response headers for a request that was forwarded unparsed.

    `conversation` is the id of its conversation; None if it is unknown.
    """
    if conversation is None:
        return UNREAD_HEADERS
    return [*UNREAD_HEADERS, (_SESSION_HEADER, conversation.encode())]


def build_report_headers(report: CompactionReport, overhead_s: float | None = None) -> Headers:
    """Returns the values of a report as response headers. Unknown values are left out.

    `overhead_s` is the time that the proxy itself added, in seconds.
    """
    saved = None
    if report.tokens_before is not None and report.tokens_after is not None:
        saved = report.tokens_before - report.tokens_after
    fields: tuple[tuple[bytes, object], ...] = (
        (b"x-compaction-status", report.status),
        (_SESSION_HEADER, report.conversation),
        (b"x-compaction-strategy", report.strategy),
        (b"x-compaction-round", report.round),
        (b"x-compaction-messages-before", report.messages_before),
        (b"x-compaction-messages-after", report.messages_after),
        (b"x-compaction-tokens-before", report.tokens_before),
        (b"x-compaction-tokens-after", report.tokens_after),
        (b"x-compaction-tokens-saved", saved),
        (b"x-compaction-context-limit", report.window),
        (b"x-compaction-until-trigger-percent", _compute_percent_left(report)),
        (b"x-compaction-max-tokens", report.max_output),
        (b"x-compaction-overhead-ms", None if overhead_s is None else f"{overhead_s * 1000:.1f}"),
        (b"x-compaction-reason", report.reason),
    )
    return [(name, str(field).encode("latin-1", "replace")) for name, field in fields if field is not None]


def _compute_percent_left(report: CompactionReport) -> int | None:
    """Returns how far the forwarded request is below the trigger T, in percent of T, rounded down.

    The result is 0 if T is reached, and None if T or the size of the forwarded request is unknown.
    """
    if not report.trigger or report.tokens_after is None:
        return None
    return max(0, 100 * (report.trigger - report.tokens_after) // report.trigger)
