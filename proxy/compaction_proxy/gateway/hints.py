"""What a request's body says of its session, where no header does.

Only what names a conversation counts: no user, no request, no trace, no address. The key of a prompt cache,
which applications may share among all their conversations, counts where it looks drawn by lot.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from compaction_proxy.gateway.identity import Hint, valid
from compaction_proxy.wires.prescan import Outline, held, outline

# Members of `metadata` that name a conversation, the first that is valid decides.
_NAMES: Final = ("session_id", "conversation_id", "thread_id", "chat_id")
# A thread of Codex is one agent; its session is that of all of them.
_CODEX: Final = ("thread_id", "session_id")
_CLAUDE_CODE: Final = "x-claude-code-session-id"
_LEGACY: Final = re.compile(r"user_.+_session_([0-9a-fA-F-]{36})")
# A UUID, or twenty letters and digits or more with a digit among them; before it perhaps the kind of id.
_DRAWN: Final = re.compile(
    r"(?:[A-Za-z]{1,16}[_:-])?(?:[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|(?=\D*\d)[0-9A-Za-z]{20,64})"
)


def hint(raw: bytes) -> Hint | None:
    """The conversation that a body names; None if it names none. Half a millisecond a megabyte."""
    told = outline(raw)
    if told is None:
        return None
    for kind, value in _told(told):
        named = valid(value.encode("utf-8", "replace")) if isinstance(value, str) else None
        if named is not None:
            return Hint(kind, named)
    return None


def _told(told: Outline) -> Iterator[tuple[str, object]]:
    """What could name it, in the order that decides."""
    if told.litellm_session_id:
        yield "x-litellm-session-id", held(told.litellm_session_id)
    if told.metadata:
        metadata = _object(told.metadata)
        yield from (("metadata." + name, metadata.get(name)) for name in _NAMES)
        yield _CLAUDE_CODE, _session_of_user(metadata.get("user_id"))
    if told.client_metadata:
        client = _object(told.client_metadata)
        yield from (("client_metadata." + name, client.get(name)) for name in _CODEX)
    if told.prompt_cache_key:
        key = held(told.prompt_cache_key)
        yield "prompt_cache_key", key if isinstance(key, str) and _DRAWN.fullmatch(key) else None


def _object(member: bytes) -> Mapping[str, object]:
    value = held(member)
    return value if isinstance(value, dict) else {}


def _session_of_user(user: object) -> object:
    """The session in Claude Code's `metadata.user_id`: JSON, or in older versions one word of three ids."""
    if not isinstance(user, str):
        return None
    if user.startswith("{"):
        return _object(user.encode("utf-8", "replace")).get("session_id")
    found = _LEGACY.fullmatch(user)
    return found[1] if found else None
