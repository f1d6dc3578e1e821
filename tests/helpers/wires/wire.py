"""What a test knows of a wire by itself: how its clients write, and what its providers refuse.

Nothing here asks our dialects: they are what is tested.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.helpers.wires.talks import Moment, Talk

JsonObject = dict[str, Any]


class Sent(NamedTuple):
    """A request body as a client sends it.

    Attributes:
        head: Its bytes up to the bracket that opens the array of messages, which belongs to it.
        elements: The array's elements.
        tail: Its bytes from the bracket that closes it.
        between: What stands between two elements.
    """

    head: bytes
    elements: tuple[bytes, ...]
    tail: bytes
    between: bytes

    @property
    def raw(self) -> bytes:
        """The body."""
        return b"".join((self.head, self.between.join(self.elements), self.tail))


@dataclass(frozen=True, slots=True)
class Wire:
    """One wire.

    Attributes:
        name: Of its dialect.
        elements: What stands in the array for what has happened.
        before: The members before it.
        behind: The members behind it.
        array: The array's name.
        output: The member that bounds the answer, in tokens.
        wrongs: What a provider would refuse in a body, or take for something else.
        user_texts: Everything that users say in a list, text by text.
        privileged: The privileged messages of a list.
        signs: Whether reasoning is tied to all the calls that came of it.
        marked: Whether clients mark what a provider shall cache, each time at the end.
    """

    name: str
    elements: Callable[[Talk, Sequence[Moment]], list[JsonObject]]
    before: JsonObject
    behind: JsonObject
    array: str
    output: str
    wrongs: Callable[[JsonObject], Iterator[str]]
    user_texts: Callable[[list[JsonObject]], list[str]]
    privileged: Callable[[list[JsonObject]], list[JsonObject]]
    signs: bool
    marked: bool = False

    def sent(self, talk: Talk, held: Sequence[Moment], **more: Any) -> Sent:
        """The body of a request that holds so much, and some more members."""
        written = _writer(talk)
        colon, comma = (b": ", b", ") if talk.spaced else (b":", b",")

        def listed(members: JsonObject) -> list[bytes]:
            return [json.dumps(name).encode() + colon + written(value) for name, value in members.items()]

        opening = comma.join([*listed(self.before), json.dumps(self.array).encode() + colon + b"["])
        closing = comma.join([b"]", *listed(self.behind | more)]) + b"}"
        elements = tuple(written(each) for each in self.elements(talk, held))
        return Sent(b"{" + opening, elements, closing, comma)


def _writer(talk: Talk) -> Callable[[Any], bytes]:
    separators = None if talk.spaced else (",", ":")

    def written(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=talk.escaped, separators=separators).encode()

    return written


def elements_of(raw: bytes, sent: Sent) -> list[bytes]:
    """The elements of a body that differs from this one in them alone."""
    text = raw[len(sent.head) : len(raw) - len(sent.tail)].decode()
    found, at, decoder = [], 0, json.JSONDecoder()
    while at < len(text):
        _, stop = decoder.raw_decode(text, at)
        found.append(text[at:stop].encode())
        at = stop + len(text[stop:]) - len(text[stop:].lstrip(", \n\r\t"))
    return found


def parts_of(content: object) -> list[JsonObject]:
    """Content as a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    assert content is None or isinstance(content, list)
    return content or []
