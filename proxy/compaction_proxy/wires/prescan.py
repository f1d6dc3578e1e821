"""What a request body says, found without parsing it: never less than is there, and perhaps more.

The gate and the recovery from overflows ask this of bodies that nobody has read, whatever their wire.
"""

import re

import msgspec

from compaction_proxy.wires.body import decode_small, shorten_model_name

# Whatever names a session is short, in bytes; a longer member is passed over. OpenAI's `metadata` may hold
# 16 values of 512 characters, and Codex tells of the folders that it works in.
MAX_MEMBER_BYTES = 16_384


class BodyOutline(msgspec.Struct, gc=False):
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


_OUTLINE = msgspec.json.Decoder(BodyOutline)
_ANY = msgspec.json.Decoder()


def scan_outline(raw: bytes) -> BodyOutline | None:
    """The members of a body; None if it is no JSON object. Takes half a millisecond a megabyte."""
    try:
        return _OUTLINE.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def decode_member(member: bytes) -> object:
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
    system = [_join_text(body.get("system")), _join_text(body.get("instructions"))]
    user: list[str] = []
    listed = body.get("messages", body.get("input"))
    for each in listed if isinstance(listed, list) else [{"role": "user", "content": listed}]:
        if isinstance(each, dict):
            texts = user if each.get("role") == "user" else system
            texts.append(_join_text(each.get("content")))
    return [text for text in system if text], [text for text in user if text]


def _join_text(content: object) -> str:
    """The text of a message's content: a string, or parts of which some have a text."""
    if isinstance(content, list):
        parts = [each.get("text") for each in content if isinstance(each, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


# An unescaped `"model"` can only be a key: inside a string its quotes would be escaped.
# The lookbehind stands behind the literal: in front of it the search would have to stop at every byte.
_MODEL = re.compile(rb'"model"(?<!\\"model")\s*:\s*"([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_OUTPUT = re.compile(rb'"max_(?<!\\"max_)(?:completion_|output_)?tokens"\s*:\s*(\d{1,18}+)\d*+\b')
_MEDIA = re.compile(rb'"(?:(?:input_)?(?:image|audio|file)(?:_url)?|video_url|document|computer_screenshot)"')
# What stands between groups of three digits, and escapes of what belongs to numbers.
_SEPARATOR = r"(?:[ ,._]|\xc2\xa0)?"
_UNESCAPED = re.compile(rb"\\(?:(\\)|u(00(?:[23][0-9a-fA-F]|[aA]0)))")
# Bytes of a body in which numbers are looked for.
MAX_SEARCHED_BYTES = 8 * 1024 * 1024


def find_models(raw: bytes) -> set[str]:
    """Every model that the body could mean, found without parsing; empty if none was found.

    A nested key of the same name may add one, so the set holds the right one and perhaps more.
    """
    return {shorten_model_name(_decode_escapes(found)) for found in _MODEL.findall(raw)}


def _decode_escapes(text: bytes) -> str:
    value = decode_small(b'"%b"' % text) if b"\\" in text else None
    return value if isinstance(value, str) else text.decode("utf-8", "replace")


def find_output_limits(raw: bytes) -> list[int]:
    """Every limit of the output that the body could mean, in tokens, found without parsing."""
    return [int(found) for found in _OUTPUT.findall(raw)]


def has_media(raw: bytes) -> bool:
    """Whether the body may hold parts whose tokens its bytes do not bound."""
    return _MEDIA.search(raw) is not None


class MentionedNumbers:
    """The numbers that stand in a body, escapes undone and thousands separators left out.

    It may hold a few more: ends of numbers with separators. Of a large body only the beginning is looked at.

    Args:
        raw: The body.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw[:MAX_SEARCHED_BYTES]

    def __contains__(self, number: object) -> bool:
        """Whether a number stands there. Takes a millisecond a megabyte."""
        if not isinstance(number, int):
            return False
        if b"\\u00" in self._raw:  # digits and separators may be escaped, too
            self._raw = _UNESCAPED.sub(_unescape_match, self._raw)
        digits = f"{number:,}".split(",")
        first, rest = digits[0], "".join([_SEPARATOR + group for group in digits[1:]])
        places = re.finditer(f"{first}{rest}(?!\\d)".encode(), self._raw)
        return any(not self._raw[max(0, found.start() - 1) : found.start()].isdigit() for found in places)


def _unescape_match(escape: re.Match[bytes]) -> bytes:
    code = escape[2]
    return chr(int(code, 16)).encode() if code else escape[0]
