"""The chat completions wire: a request body to core records and back.

There is no schema here. What we do not understand survives because it is never decoded into anything but
itself, and what is forwarded is the client's own body with only the value of `messages` replaced.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from proxy.core.message import Message
from proxy.dialects.chat_message import compose
from proxy.dialects.json_slices import Slice, elements, members
from proxy.errors import Unreadable

# Members that a provider turns into prompt tokens beside the messages.
PROMPT_MEMBERS = ("tools", "functions", "response_format")
# Members that say how long an answer may be.
_OUTPUT_MEMBERS = ("max_completion_tokens", "max_tokens")
_FIRST = itemgetter(0)
_MATTERING = ("model", *_OUTPUT_MEMBERS, *PROMPT_MEMBERS)

# An unescaped `"model"` can only be a key: inside a string its quotes would be escaped.
# The lookbehind stands behind the literal: in front of it the search would have to stop at every byte.
_MODEL = re.compile(rb'"model"(?<!\\"model")\s*:\s*"([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_OUTPUT = re.compile(rb'"max_(?<!\\"max_)(?:completion_)?tokens"\s*:\s*(\d{1,18}+)\d*+\b')
_MEDIA = re.compile(rb'"(?:image_url|video_url|input_audio|file)"')
# What stands between groups of three digits, and escapes of what belongs to numbers.
_SEPARATOR = r"(?:[ ,._]|\xc2\xa0)?"
_UNESCAPED = re.compile(rb"\\(?:(\\)|u(00(?:[23][0-9a-fA-F]|[aA]0)))")
# More messages than this are no conversation that a model could read.
MAX_MESSAGES = 100_000
# Bytes of a body in which numbers are looked for.
MAX_SEARCHED_BYTES = 8 * 1024 * 1024
# A longer name is no model's; its beginning and digest stand for it, so that no memory and no log holds it.
MAX_MODEL_CHARACTERS = 256
# Whole numbers of at most so many digits are read without a decoder.
_DIGITS = 18


class Body(NamedTuple):  # made for each request: a dataclass costs four times as much
    """A request body, cut up.

    Attributes:
        raw: The client's bytes.
        place: Where in them the value of `messages` stands.
        late: Each message's bytes; where `since` is set, only of those that came behind it.
        model: The model asked for; empty if the body names none.
        max_output: Largest output asked for, in tokens; None if the body does not say.
        prompt_members: The JSON of tools and the like, which count as prompt tokens.
        mark: Names these very messages of this tenant; empty if they are not to be known again.
        since: The mark of an earlier body, which begins with the messages that are not in `late`; or empty.
    """

    raw: bytes
    place: Slice
    late: tuple[bytes, ...]
    model: str
    max_output: int | None
    prompt_members: tuple[str, ...]
    mark: bytes = b""
    since: bytes = b""

    @property
    def messages(self) -> tuple[bytes, ...]:
        """Each message's bytes, cut out anew where only the late ones have been."""
        return elements(memoryview(self.raw)[self.place.start : self.place.stop]) if self.since else self.late


def models_named(raw: bytes) -> set[str]:
    """Every model that the body could mean, found without parsing; empty if none was found.

    A nested key of the same name may add one, so the set holds the right one and perhaps more.
    """
    return {bounded(_unescaped(found)) for found in _MODEL.findall(raw)}


def _unescaped(text: bytes) -> str:
    value = _small(b'"%b"' % text) if b"\\" in text else None
    return value if isinstance(value, str) else text.decode("utf-8", "replace")


def outputs_named(raw: bytes) -> list[int]:
    """Every limit of the output that the body could mean, in tokens, found without parsing."""
    return [int(found) for found in _OUTPUT.findall(raw)]


def has_media(raw: bytes) -> bool:
    """Whether the body may hold parts whose tokens its bytes do not bound."""
    return _MEDIA.search(raw) is not None


def read(raw: bytes) -> Body:
    """Cut a request body up.

    Raises:
        Unreadable: It is no chat request that we could rewrite: `not-json`, `duplicate-keys`,
            `no-messages`, `no-array`, `too-deep`, `too-many`.
    """
    found, late = cut(raw)
    return made(raw, found["messages"], late, named_by(small_members(raw, found)))


def cut(raw: bytes) -> tuple[dict[str, Slice], tuple[bytes, ...]]:
    """Where the members of a body stand, and its messages.

    Raises:
        Unreadable: See `read`.
    """
    try:
        found = members(raw)
        place = found.get("messages")
        messages = elements(memoryview(raw)[place.start : place.stop]) if place else ()
    except RecursionError:
        raise Unreadable("too-deep") from None
    if len(messages) > MAX_MESSAGES:
        raise Unreadable("too-many")
    if not messages or not are_objects(messages):
        raise Unreadable("no-messages")
    return found, messages


def are_objects(values: Iterable[bytes]) -> bool:
    """Whether each of these JSON values is an object."""
    return set(map(_FIRST, values)) <= {ord("{")}


def small_members(raw: bytes, found: Mapping[str, Slice]) -> dict[str, bytes]:
    """What of a body matters to us beside the messages, of the members that were found."""
    return {key: raw[found[key].start : found[key].stop] for key in _MATTERING if key in found}


class Named(NamedTuple):
    """What the members of a body say; see `Body`."""

    model: str
    max_output: int | None
    prompt_members: tuple[str, ...]


def named_by(rest: Mapping[str, bytes]) -> Named:
    """What `small_members` say."""
    model = _value(rest.get("model"))
    return Named(
        bounded(model) if isinstance(model, str) else "",
        _max_output(rest),
        tuple([rest[key].decode("utf-8", "replace") for key in PROMPT_MEMBERS if key in rest]),
    )


def made(
    raw: bytes, place: Slice, late: tuple[bytes, ...], named: Named, mark: bytes = b"", since: bytes = b""
) -> Body:
    """A body of its parts."""
    return Body(raw, place, late, named.model, named.max_output, named.prompt_members, mark, since)


def bounded(model: str) -> str:
    """A model's name, cut to what a name can be."""
    if len(model) <= MAX_MODEL_CHARACTERS:
        return model
    return f"{model[:64]}…{hashlib.sha256(model.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


class Mentioned:
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
            self._raw = _UNESCAPED.sub(_plain, self._raw)
        digits = f"{number:,}".split(",")
        first, rest = digits[0], "".join([_SEPARATOR + group for group in digits[1:]])
        places = re.finditer(f"{first}{rest}(?!\\d)".encode(), self._raw)
        return any(not self._raw[max(0, found.start() - 1) : found.start()].isdigit() for found in places)


def _plain(escape: re.Match[bytes]) -> bytes:
    code = escape[2]
    return chr(int(code, 16)).encode() if code else escape[0]


PROBE_TOKENS = 16
_NOT_PROBED = frozenset({"stream", "stream_options", "n", *_OUTPUT_MEMBERS})


def probe_body(raw: bytes) -> bytes | None:
    """A request that costs as little as can be and is counted like this one; None if it is none."""
    fields = _small(raw)
    if not isinstance(fields, dict):
        return None
    named = next((each for each in _OUTPUT_MEMBERS if each in fields), "max_tokens")
    kept = {key: value for key, value in fields.items() if key not in _NOT_PROBED}
    return json.dumps({**kept, named: PROBE_TOKENS}).encode()


def with_output(body: Body, tokens: int) -> bytes:
    """The client's body asking for so many tokens of output where it asks for more; else as it is."""
    if body.max_output is None or body.max_output <= tokens:
        return body.raw
    found = members(body.raw)
    places = sorted((found[key] for key in _OUTPUT_MEMBERS if key in found), reverse=True)
    raw = body.raw
    for place in places:
        raw = raw[: place.start] + b"%d" % tokens + raw[place.stop :]
    return raw


def _max_output(rest: Mapping[str, bytes]) -> int | None:
    for key in _OUTPUT_MEMBERS:
        asked = _value(rest[key]) if key in rest else None
        if type(asked) is int and asked > 0:
            return asked
    return None


def _value(raw: bytes | None) -> Any:
    """The value of a small member that is known to be JSON; plain strings and numbers without a decoder."""
    if raw is None:
        return None
    if raw.startswith(b'"') and b"\\" not in raw:
        return raw[1:-1].decode()
    return int(raw) if raw.isdigit() and len(raw) <= _DIGITS else _small(raw)


def _small(raw: bytes | None) -> Any:
    """The value of a small member; None if it is absent or cannot be read."""
    try:
        return None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None


def write(body: Body, messages: Sequence[Message]) -> bytes:
    """The client's body with other messages; every other byte is its own."""
    joined = b",".join(message.raw or compose(message) for message in messages)
    return b"".join((body.raw[: body.place.start], b"[", joined, b"]", body.raw[body.place.stop :]))
