"""Messages taken apart: tool results of a user message are pieces of their own, as is what comes with them.

A provider wants all results of one answer's calls in a single message, and what the user says behind them in
the same one. To the engine each is a message; but what a client's program reminds the model of beside results
was said by no user, and stays with the last of them.
"""

from collections.abc import Iterator
from typing import Final

from compaction_proxy.core.errors import Unreadable
from compaction_proxy.wires.messages.blocks import RESULT, blocks_of, is_reminder, kind_of, places_of

_MEMBERS: Final = ("content", "role")
_USER: Final = b'"user"'
_WORTH_A_LOOK: Final = b'"tool_result"', b'"compaction"'
# What a provider has put in the place of a conversation. What stands before it, no model reads.
_COMPACTION: Final = "compaction"
PROVIDER_COMPACTS: Final = "provider-compacts"


def pieces(listed: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The elements of `messages` as pieces; bytes of blocks are the client's own.

    Raises:
        Unreadable: One of them is no message, or holds what the provider has compacted.
    """
    found: list[bytes] = []
    for each in listed:
        if any(sign in each for sign in _WORTH_A_LOOK):
            found += _parted(each)
        else:
            found.append(each)
    return tuple(found)


def _parted(raw: bytes) -> Iterator[bytes]:
    places = places_of(raw)
    content, role = (raw[at.start : at.stop] if (at := places.get(name)) else b"" for name in _MEMBERS)
    blocks = blocks_of(content) if content.startswith(b"[") else ()
    kinds = [kind_of(each) for each in blocks]
    if _COMPACTION in kinds:
        raise Unreadable(PROVIDER_COMPACTS)
    if role != _USER or RESULT not in kinds or len(blocks) == 1:
        yield raw
        return
    rest = [each for each, kind in zip(blocks, kinds, strict=True) if kind != RESULT]
    results = [each for each, kind in zip(blocks, kinds, strict=True) if kind == RESULT]
    if rest and all(map(is_reminder, rest)):
        results[-1] = b",".join((results[-1], *rest))
        rest = []
    yield from map(_user, results)
    if rest:
        yield _user(b",".join(rest))


def _user(blocks: bytes) -> bytes:
    return b'{"role":"user","content":[%b]}' % blocks
