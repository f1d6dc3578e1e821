"""The wires that are spoken, by name and by path."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from proxy.dialects.chat.wire import CHAT
from proxy.dialects.dialect import Dialect
from proxy.dialects.messages.wire import MESSAGES
from proxy.dialects.responses.wire import RESPONSES

WIRES: Final[Mapping[str, Dialect]] = MappingProxyType(
    {each.name: each for each in (CHAT, MESSAGES, RESPONSES)}
)


def dialect_of(method: str, raw_path: bytes) -> Dialect | None:
    """The wire of a request that carries a conversation, under whatever prefix; None where it does not."""
    if method != "POST":
        return None
    for each in WIRES.values():
        if raw_path.endswith(each.ending):
            return each
    return None
