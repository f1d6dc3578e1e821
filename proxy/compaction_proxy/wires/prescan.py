"""Finds single values in a request body of any wire. Most functions do so without decoding the whole body.

The gate uses this module. The gate is the check by size that lets small requests pass unparsed. The code that
handles a provider's error about a request that is too long uses the module, too. Functions that search the
bytes of a body for a pattern may also find similar text at other places in the body.
"""

import re

import msgspec

from compaction_proxy.wires.body import decode_small_json, shorten_model_name

# `decode_member` returns None for a member with more bytes than this, because the values that identify a
# session are short. The limit is large enough for OpenAI's `metadata`, which may have 16 values of 512
# characters, and for the list of folders that Codex sends.
MAX_MEMBER_BYTES = 16_384


class BodyOutline(msgspec.Struct, gc=False):
    """The members of a body that may identify its session or limit the model's output, as undecoded JSON.

    An attribute is empty if the body does not have the member.

    Attributes:
        litellm_session_id: The session id that clients of LiteLLM send.
        metadata: The metadata that clients of OpenAI and Anthropic send. It may contain a session id.
        client_metadata: The metadata that Codex sends. It may contain a session id.
        prompt_cache_key: A key that is the same in all requests that share a prompt cache. These are usually
            the requests of one conversation.
        max_tokens: The output limit, in tokens.
        max_completion_tokens: The output limit, in tokens, under another name.
        max_output_tokens: The output limit, in tokens, under another name.
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
    """Returns a body's `BodyOutline`; None if the body is not a JSON object. Takes 0.5 ms per megabyte."""
    try:
        return _OUTLINE.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def decode_member(member: bytes) -> object:
    """Decodes a member; None if it is empty, has more than `MAX_MEMBER_BYTES` bytes, or is not JSON."""
    return _decode(member) if 0 < len(member) <= MAX_MEMBER_BYTES else None


def _decode(raw: bytes) -> object:
    try:
        value: object = _ANY.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value


def read_system_and_user_texts(raw: bytes) -> tuple[list[str], list[str]]:
    """Returns two lists: the texts of a body's system prompts, and the texts of its user messages.

    The body may be of any wire. Messages of all roles except `user` count as system prompts. The function
    parses the whole body, so the body should be small.
    """
    body = _decode(raw)
    if not isinstance(body, dict):
        return [], []
    system = [_join_text(body.get("system")), _join_text(body.get("instructions"))]
    user: list[str] = []
    messages = body.get("messages", body.get("input"))
    for each in messages if isinstance(messages, list) else [{"role": "user", "content": messages}]:
        if isinstance(each, dict):
            texts = user if each.get("role") == "user" else system
            texts.append(_join_text(each.get("content")))
    return [text for text in system if text], [text for text in user if text]


def _join_text(content: object) -> str:
    """Returns the text of a message's content, which is a string or a list of parts."""
    if isinstance(content, list):
        parts = [each.get("text") for each in content if isinstance(each, dict)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


# `_MODEL` and `_OUTPUT` match only a key of an object and its value. They do not match such text in a string,
# because there the quotes are escaped. In each pattern, the lookbehind follows the literal text, because
# Python would have to try a pattern that begins with a lookbehind at every byte.
_MODEL = re.compile(rb'"model"(?<!\\"model")\s*:\s*"([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_OUTPUT = re.compile(rb'"max_(?<!\\"max_)(?:completion_|output_)?tokens"\s*:\s*(\d{1,18}+)\d*+\b')
_MEDIA = re.compile(rb'"(?:(?:input_)?(?:image|audio|file)(?:_url)?|video_url|document|computer_screenshot)"')
# `_SEPARATOR` matches one separator between groups of three digits, or an empty text. `_UNESCAPED` matches
# the JSON escape of a digit or a separator, such as `\u0031`, or an escaped backslash.
_SEPARATOR = r"(?:[ ,._]|\xc2\xa0)?"
_UNESCAPED = re.compile(rb"\\(?:(\\)|u(00(?:[23][0-9a-fA-F]|[aA]0)))")
# `MentionedNumbers` searches only the first bytes of a body, at most this many, because a search takes a
# millisecond per megabyte.
MAX_NUMBER_SEARCH_BYTES = 8 * 1024 * 1024


def find_models(raw: bytes) -> set[str]:
    """Returns every string value of a key `model` in the body, without parsing the body.

    The set contains the requested model. It may also contain values of nested keys of the same name.
    """
    return {shorten_model_name(_decode_escapes(name)) for name in _MODEL.findall(raw)}


def _decode_escapes(text: bytes) -> str:
    value = decode_small_json(b'"%b"' % text) if text.find(b"\\") >= 0 else None
    return value if isinstance(value, str) else text.decode("utf-8", "replace")


def find_output_limits(raw: bytes) -> list[int]:
    """Returns every number in the body that may be its output limit, in tokens. Does not parse the body."""
    return [int(digits) for digits in _OUTPUT.findall(raw)]


def may_have_media(raw: bytes) -> bool:
    """Returns whether the body may contain images or other parts that can take more tokens than bytes."""
    return _MEDIA.search(raw) is not None


class MentionedNumbers:
    """The whole numbers in a body, with or without thousands separators and escapes.

    Use `in` to test whether a number occurs in the first `MAX_NUMBER_SEARCH_BYTES` bytes of the body. A
    number also occurs if it is the end of a longer number with separators, such as 234 in 1,234.

    Args:
        raw: The body.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw[:MAX_NUMBER_SEARCH_BYTES]

    def __contains__(self, number: object) -> bool:
        """Returns whether the number occurs in the body. Takes a millisecond per megabyte."""
        if not isinstance(number, int):
            return False
        if b"\\u00" in self._raw:  # digits and separators may be escaped
            self._raw = _UNESCAPED.sub(_unescape_match, self._raw)
        digits = f"{number:,}".split(",")
        first, rest = digits[0], "".join([_SEPARATOR + group for group in digits[1:]])
        places = re.finditer(f"{first}{rest}(?!\\d)".encode(), self._raw)
        return any(not self._raw[max(0, found.start() - 1) : found.start()].isdigit() for found in places)


def _unescape_match(escape: re.Match[bytes]) -> bytes:
    code = escape[2]
    return chr(int(code, 16)).encode() if code else escape[0]
