"""Splits streams of server-sent events into events, and reads or replaces the data of an event.

Lines may end with CRLF, LF or CR. A stream may arrive in chunks of any size. If the data of an event is
replaced, the comments and the other fields of the event stay unchanged.
"""

import re
from typing import Final

import msgspec

DONE_DATA: Final = b"[DONE]"
# If an event has more bytes than this, `EventSplitter` returns it in parts, as if each part were an event.
# This saves memory. `read_data` cannot read the data of such an event.
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024

# Matches the end of an event, which is two line ends. The second line end may not be a CR at the very end of
# the bytes, because the next chunk may begin with an LF that belongs to this CR.
_BORDER: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r(?=.))", re.DOTALL)
_USUAL_BORDER: Final = b"\n\n"
_LONGEST_BORDER: Final = 4
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_LINE: Final = re.compile(rb"[^\r\n]*(?>\r\n|\n|\r|\Z)")
_DATA: Final = b"data:"


class EventSplitter:
    """Splits a stream into events. The bytes of an event include the blank line that ends it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._search_start = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Takes the next bytes of the stream. Returns the events that end in these bytes, in order."""
        if not self._buffer and chunk.endswith(_USUAL_BORDER) and b"\r" not in chunk:  # the usual case
            *events, rest = chunk.split(_USUAL_BORDER)
            if not rest:
                return [each + _USUAL_BORDER for each in events]
        self._buffer += chunk
        whole_events: list[bytes] = []
        start = 0
        while border := _BORDER.search(self._buffer, max(start, self._search_start)):
            whole_events.append(bytes(self._buffer[start : border.end()]))
            start = border.end()
        if len(self._buffer) - start > MAX_EVENT_BYTES:
            whole_events.append(bytes(self._buffer[start:]))
            start = len(self._buffer)
        if start:
            self._buffer = self._buffer[start:]
        self._search_start = max(0, len(self._buffer) - _LONGEST_BORDER + 1)
        return whole_events

    def flush_rest(self) -> bytes:
        """Returns the bytes after the last complete event. Call it when the stream has ended."""
        rest, self._buffer, self._search_start = bytes(self._buffer), bytearray(), 0
        return rest


def read_data(event: bytes) -> bytes:
    """Returns the data of an event; empty if it has no data, for example because it is only a comment."""
    if event.startswith(_DATA) and event.count(b"\n") == 2 and event.endswith(b"\n\n"):  # the usual case
        return event[len(_DATA) :].strip(b" \n")
    lines = _LINE_END.split(event)
    return b"\n".join(line[len(_DATA) :].removeprefix(b" ") for line in lines if line.startswith(_DATA))


def replace_data(event: bytes, data: bytes) -> bytes:
    """Returns the event with `data`, which must be one line, in place of its own data.

    All other lines, and all line ends, stay the same.
    """
    parts: list[bytes] = []
    is_written = False
    for line in _LINE.findall(event):
        if not line.startswith(_DATA):
            parts.append(line)
        elif not is_written:
            is_written = True
            parts += b"data: ", data, line[len(line.rstrip(b"\r\n")) :]
    return b"".join(parts)


class _TypedEvent(msgspec.Struct, gc=False):
    type: str = ""


_TYPED_EVENT: Final = msgspec.json.Decoder(_TypedEvent)


def has_only_events(seen: bytes, types: frozenset[str]) -> bool:
    """Returns whether each complete event in `seen` is a comment, or has data with one of these types.

    `seen` contains the first bytes of a stream. Returns False if the data of an event is not a JSON object.
    """
    try:
        data = filter(None, map(read_data, EventSplitter().feed(seen)))
        return all(_TYPED_EVENT.decode(each).type in types for each in data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
