"""The `x-compaction*` headers: what a client asks for, pins included, and what an answer says."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from compaction_proxy.compaction.directives import MAX_PIN_CHARACTERS, MAX_PINS, valid_pin
from compaction_proxy.compaction.types import Mode, Report, Status
from compaction_proxy.core.errors import RequestRefused
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.headers import Headers, first_values

PIN_HEADER = b"x-compaction-pin"


def pins(headers: Sequence[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """The pins of a request, in their order, each once; names are in lower case.

    Raises:
        RequestRefused: 400, one is empty, too long, holds a control character, or is no UTF-8; or there are
            more than a conversation may have.
    """
    found = tuple(dict.fromkeys(_pin(held) for name, held in headers if name == PIN_HEADER))
    if len(found) > MAX_PINS:
        raise _refuse_pin(f"may come {MAX_PINS} times at most")
    return found


def _pin(held: bytes) -> str:
    try:
        pin = valid_pin(unquote_to_bytes(held).decode("utf-8"))
    except UnicodeDecodeError:
        raise _refuse_pin("must be UTF-8, or percent-encoded UTF-8") from None
    if pin is None:
        raise _refuse_pin(f"must hold 1 to {MAX_PIN_CHARACTERS} characters, none of them a control character")
    return pin


def _refuse_pin(wanted: str) -> RequestRefused:
    return RequestRefused(400, f"The header {PIN_HEADER.decode()} {wanted}.", "invalid_compaction_header")


_REQUESTED = {mode.value: mode for mode in (Mode.FORCE, Mode.BYPASS, Mode.SHADOW)}
_TRIGGER = re.compile(r"0{0,9}[1-9][0-9]{0,8}")
# Fields by which a request asks for anything but the usual, in the order of `_control`.
_ASKED = (b"x-compaction", b"x-compaction-strategy", b"x-compaction-trigger-tokens")
ASKING = frozenset({*_ASKED, PIN_HEADER})
# Those by which SDKs say how long they wait for an answer, in seconds.
_PATIENCE = (b"x-stainless-read-timeout", b"x-stainless-timeout")
# What a request is told that went on unread.
UNREAD: Headers = [(b"x-compaction-status", Status.NONE.value.encode())]


@dataclass(frozen=True, slots=True)
class Control:
    """What the client asked of us.

    Attributes:
        mode: How to treat the request; None: as configured.
        trigger_tokens: A lower trigger, in tokens.
        strategy: The strategy to use; None: the configured one.
        patience_s: Seconds after which the client gives up.
        pins: What is to be kept word for word.
    """

    mode: Mode | None = None
    trigger_tokens: int | None = None
    strategy: str | None = None
    patience_s: float | None = None
    pins: tuple[str, ...] = ()

    @property
    def in_force(self) -> bool:
        """Whether the request asks for anything but the usual."""
        return any((self.mode, self.trigger_tokens, self.strategy, self.pins))


def _word(field: bytes | None) -> str | None:
    return None if field is None else field.decode("latin-1").strip().lower()


def _refused(name: str, wanted: str) -> RequestRefused:
    return RequestRefused(400, f"The header {name} must be {wanted}.", "invalid_compaction_header")


def control(headers: Sequence[tuple[bytes, bytes]]) -> Control:
    """The client's wishes.

    Raises:
        RequestRefused: 400, one of them cannot be understood.
    """
    first = first_values(headers)
    usual = _control(*map(first.get, _ASKED + _PATIENCE))
    return replace(usual, pins=pins(headers)) if PIN_HEADER in first else usual


@lru_cache(maxsize=128)
def _control(
    asked_mode: bytes | None,
    asked_strategy: bytes | None,
    asked_tokens: bytes | None,
    *patience: bytes | None,
) -> Control:
    """The client's wishes without pins; most requests of a client ask for the same."""
    mode = _word(asked_mode)
    if mode is not None and mode not in _REQUESTED:
        raise _refused("x-compaction", "force, bypass or shadow")
    strategy = _word(asked_strategy)
    if strategy is not None and strategy not in STRATEGIES:
        raise _refused("x-compaction-strategy", "one of " + ", ".join(sorted(STRATEGIES)))
    tokens = _word(asked_tokens)
    if tokens is not None and not _TRIGGER.fullmatch(tokens):
        raise _refused("x-compaction-trigger-tokens", "a whole number of tokens above 0")
    return Control(
        mode=_REQUESTED[mode] if mode else None,
        trigger_tokens=int(tokens) if tokens else None,
        strategy=strategy,
        patience_s=_patience(patience),
    )


def _patience(fields: Iterable[bytes | None]) -> float | None:
    for field in fields:
        try:
            seconds = float(_word(field) or 0)
        except ValueError:
            continue
        if 0 < seconds < 86_400:
            return seconds
    return None


def stricter(configured: Mode, asked: Mode | None) -> Mode:
    """The stricter of what is configured and what a request asks for."""
    if asked is None or configured is Mode.BYPASS:
        return configured
    return Mode.SHADOW if configured is Mode.SHADOW and asked is Mode.FORCE else asked


def report_headers(report: Report, overhead_s: float | None = None) -> Headers:
    """The report as response headers; what is not known is left out."""
    saved = None
    if report.tokens_before is not None and report.tokens_after is not None:
        saved = report.tokens_before - report.tokens_after
    told: tuple[tuple[bytes, object], ...] = (
        (b"x-compaction-status", report.status),
        (b"x-compaction-session", report.conversation),
        (b"x-compaction-strategy", report.strategy),
        (b"x-compaction-round", report.round),
        (b"x-compaction-messages-before", report.messages_before),
        (b"x-compaction-messages-after", report.messages_after),
        (b"x-compaction-tokens-before", report.tokens_before),
        (b"x-compaction-tokens-after", report.tokens_after),
        (b"x-compaction-tokens-saved", saved),
        (b"x-compaction-context-limit", report.window),
        (b"x-compaction-until-trigger-percent", _until_trigger(report)),
        (b"x-compaction-max-tokens", report.max_output),
        (b"x-compaction-overhead-ms", None if overhead_s is None else f"{overhead_s * 1000:.1f}"),
        (b"x-compaction-reason", report.reason),
    )
    return [(name, str(field).encode("latin-1", "replace")) for name, field in told if field is not None]


def _until_trigger(report: Report) -> int | None:
    """Percent of T that are left until it is reached; 0 once it is."""
    if not report.trigger or report.tokens_after is None:
        return None
    return max(0, 100 * (report.trigger - report.tokens_after) // report.trigger)
