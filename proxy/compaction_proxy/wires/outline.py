"""The few members of a request's body that tell whose it is, found in one pass that builds nothing else.

Every wire has them under the same names. What is asked here is asked of bodies that nobody has read and of
bodies that are read, so that a conversation has one name in both.
"""

import msgspec

# Whatever names a session is short, in bytes; a longer member is passed over. OpenAI's `metadata` may hold
# 16 values of 512 characters, and Codex tells of the folders that it works in.
MAX_MEMBER_BYTES = 16_384


class Outline(msgspec.Struct, gc=False):
    """Members as JSON, left as they are; empty where they are absent.

    Attributes:
        litellm_session_id: Of LiteLLM's callers.
        metadata: Of OpenAI's and Anthropic's callers.
        client_metadata: Of Codex.
        prompt_cache_key: Names what shares a cache: mostly a conversation.
        max_tokens: How long the answer may be; so do the next two, in other wires.
        max_completion_tokens: See there.
        max_output_tokens: See there.
    """

    litellm_session_id: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    client_metadata: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()


_OUTLINE = msgspec.json.Decoder(Outline)
_ANY = msgspec.json.Decoder()


def outline(raw: bytes) -> Outline | None:
    """The members of a body; None if it is no JSON object. Takes half a millisecond a megabyte."""
    try:
        return _OUTLINE.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def held(member: bytes) -> object:
    """The value of a short member; None if it is absent, long or no JSON."""
    if not 0 < len(member) <= MAX_MEMBER_BYTES:
        return None
    try:
        value: object = _ANY.decode(member)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value


def read_texts(raw: bytes) -> tuple[list[str], list[str]]:
    """The texts of a small body's system prompts, and those of its user messages, on every wire."""
    try:
        body = _ANY.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [], []
    if not isinstance(body, dict):
        return [], []
    system = [_text(body.get("system")), _text(body.get("instructions"))]
    user: list[str] = []
    listed = body.get("messages", body.get("input"))
    for each in listed if isinstance(listed, list) else [{"role": "user", "content": listed}]:
        if isinstance(each, dict):
            texts = user if each.get("role") == "user" else system
            texts.append(_text(each.get("content")))
    return [text for text in system if text], [text for text in user if text]


def _text(content: object) -> str:
    """The text of a message's content: a string, or parts of which some have a text."""
    if isinstance(content, list):
        parts = [each.get("text") for each in content if isinstance(each, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
