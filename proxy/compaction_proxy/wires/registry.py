"""Lists the supported wires by name, and finds the wire of a request by its method and path."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.messages.wire import MESSAGES
from compaction_proxy.wires.responses.wire import RESPONSES
from compaction_proxy.wires.wire import Wire

WIRES: Final[Mapping[str, Wire]] = MappingProxyType({each.name: each for each in (CHAT, MESSAGES, RESPONSES)})


@lru_cache(maxsize=64)
def find_wire(method: str, raw_path: bytes) -> Wire | None:
    """Returns the wire of a request that posts a conversation; None for other requests.

    Compares only the end of the path, so the path may have any prefix.
    """
    if method != "POST":
        return None
    return next((each for each in WIRES.values() if raw_path.endswith(each.path_suffix)), None)
