"""Server-sent events as bytes: where one ends, what it carries, and the same event carrying something else.

Lines may end in any of the three ways, and a stream may have been sliced anywhere: what comes out does not
depend on that. Comments and fields other than `data` stay as they are.
"""

import re
from typing import Final

DONE: Final = b"[DONE]"
# The beginning of a larger event goes on as it is, as if it were one; what stands in it is not seen.
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024

# Two line ends; a CR at the very end may be half of one.
_BORDER: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r(?=.))", re.DOTALL)
_USUAL: Final = b"\n\n"
_LONGEST_BORDER: Final = 4
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_LINE: Final = re.compile(rb"[^\r\n]*(?>\r\n|\n|\r|\Z)")
_DATA: Final = b"data:"


class EventSplitter:
    """Cuts a stream into events, each as its own bytes with the blank line behind it."""

    __slots__ = ("_held", "_looked")

    def __init__(self) -> None:
        self._held = bytearray()
        self._looked = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that are whole with these bytes, in their order."""
        if not self._held and chunk.endswith(_USUAL) and b"\r" not in chunk:  # as nearly always
            *events, rest = chunk.split(_USUAL)
            if not rest:
                return [each + _USUAL for each in events]
        self._held += chunk
        found: list[bytes] = []
        start = 0
        while border := _BORDER.search(self._held, max(start, self._looked)):
            found.append(bytes(self._held[start : border.end()]))
            start = border.end()
        if len(self._held) - start > MAX_EVENT_BYTES:
            found.append(bytes(self._held[start:]))
            start = len(self._held)
        if start:
            self._held = self._held[start:]
        self._looked = max(0, len(self._held) - _LONGEST_BORDER + 1)
        return found

    def flush_rest(self) -> bytes:
        """What came behind the last event, once the stream is at its end."""
        held, self._held, self._looked = bytes(self._held), bytearray(), 0
        return held


def read_data(event: bytes) -> bytes:
    """What an event carries; empty where that is nothing, as in a comment."""
    if event.startswith(_DATA) and event.count(b"\n") == 2 and event.endswith(b"\n\n"):  # as nearly all do
        return event[len(_DATA) :].strip(b" \n")
    lines = _LINE_END.split(event)
    return b"\n".join(line[len(_DATA) :].removeprefix(b" ") for line in lines if line.startswith(_DATA))


def replace_data(event: bytes, data: bytes) -> bytes:
    """The event carrying this, which is one line; its other lines and its line ends are its own."""
    kept: list[bytes] = []
    told = False
    for line in _LINE.findall(event):
        if not line.startswith(_DATA):
            kept.append(line)
        elif not told:
            told = True
            kept += b"data: ", data, line[len(line.rstrip(b"\r\n")) :]
    return b"".join(kept)
