"""Texts that a request pins, in `x-compaction-pin` headers: each field is one pin.

A header holds Latin text at best, so any character may be written as its UTF-8 bytes in percent-encoding; a
percent sign that no two hex digits follow stands for itself. A field is never split at a comma, because pins
are prose.
"""

from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from compaction_proxy.compaction.directives import MAX_PIN_CHARACTERS, MAX_PINS, valid_pin
from compaction_proxy.core.errors import RequestRefused

PIN_HEADER = b"x-compaction-pin"


def pins(headers: Sequence[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """The pins of a request, in their order, each once; names are in lower case.

    Raises:
        RequestRefused: 400, one is empty, too long, holds a control character, or is no UTF-8; or there are
            more than a conversation may have.
    """
    found = tuple(dict.fromkeys(_pin(held) for name, held in headers if name == PIN_HEADER))
    if len(found) > MAX_PINS:
        raise _refused(f"may come {MAX_PINS} times at most")
    return found


def _pin(held: bytes) -> str:
    try:
        pin = valid_pin(unquote_to_bytes(held).decode("utf-8"))
    except UnicodeDecodeError:
        raise _refused("must be UTF-8, or percent-encoded UTF-8") from None
    if pin is None:
        raise _refused(f"must hold 1 to {MAX_PIN_CHARACTERS} characters, none of them a control character")
    return pin


def _refused(wanted: str) -> RequestRefused:
    return RequestRefused(400, f"The header {PIN_HEADER.decode()} {wanted}.", "invalid_compaction_header")
