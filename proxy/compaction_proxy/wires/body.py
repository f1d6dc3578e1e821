"""A request body, whatever its wire: cut up, and written again with other messages.

There is no schema here. What we do not understand survives because it is never decoded into anything but
itself, and what is forwarded is the client's own body with only its array of messages replaced.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from compaction_proxy.core.budget import LEAST_OUTPUT_TOKENS
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.message import Message
from compaction_proxy.wires.json.slices import Slice, members
from compaction_proxy.wires.wire import Dialect, Suited

_FIRST = itemgetter(0)
# More messages than this are no conversation that a model could read.
MAX_MESSAGES = 100_000
# A longer name is no model's; its beginning and digest stand for it, so that no memory and no log holds it.
MAX_MODEL_CHARACTERS = 256
# Whole numbers of at most so many digits are read without a decoder.
_DIGITS = 18
PROBE_TOKENS = 16
# Anthropic takes no smaller budget of thinking, in tokens.
LEAST_THINKING_TOKENS = 1_024
_NOT_PROBED = frozenset({"stream", "stream_options", "n"})


class Body(NamedTuple):  # made for each request: a dataclass costs four times as much
    """A request body, cut up.

    Attributes:
        raw: The client's bytes.
        place: Where in them the value that holds the messages stands.
        late: Each message's bytes, as pieces; where `since` is set, only of those that came behind it.
        model: The model asked for; empty if the body names none.
        max_output: Largest output asked for, in tokens; None if the body does not say.
        prompt_members: The JSON of tools and the like, which count as prompt tokens.
        dialect: The wire.
        mark: Names these very messages of this tenant; empty if they are not to be known again.
        since: The mark of an earlier body, which begins with the messages that are not in `late`; or empty.
    """

    raw: bytes
    place: Slice
    late: tuple[bytes, ...]
    model: str
    max_output: int | None
    prompt_members: tuple[str, ...]
    dialect: Dialect
    mark: bytes = b""
    since: bytes = b""

    @property
    def messages(self) -> tuple[bytes, ...]:
        """Each message's bytes, cut out anew where only the late ones have been."""
        if not self.since:
            return self.late
        value = memoryview(self.raw)[self.place.start : self.place.stop]
        return self.dialect.pieces(self.dialect.listed(value))


def read(raw: bytes, dialect: Dialect) -> Body:
    """Cut a request body up.

    Raises:
        Unreadable: It is no request that we could rewrite: `not-json`, `duplicate-keys`, `no-messages`,
            `no-array`, `too-deep`, `too-many`; or one that its dialect wants left as it is.
    """
    found, listed = cut(raw, dialect)
    place = found[dialect.members.messages]
    return made(
        raw, place, dialect.pieces(listed), named_by(small_members(raw, found, dialect), dialect), dialect
    )


def cut(raw: bytes, dialect: Dialect) -> tuple[dict[str, Slice], tuple[bytes, ...]]:
    """Where the members of a body stand, and the elements of its messages.

    Raises:
        Unreadable: See `read`.
    """
    try:
        found = members(raw)
        place = found.get(dialect.members.messages)
        listed = dialect.listed(memoryview(raw)[place.start : place.stop]) if place else ()
    except RecursionError:
        raise Unreadable("too-deep") from None
    if len(listed) > MAX_MESSAGES:
        raise Unreadable("too-many")
    if not listed:
        raise Unreadable("no-messages")
    telling = {
        key: raw[found[key].start : found[key].stop] for key in dialect.members.telling if key in found
    }
    if telling and (reason := dialect.left(telling)):
        raise Unreadable(reason)
    return found, listed


def are_objects(values: Iterable[bytes]) -> bool:
    """Whether each of these JSON values is an object."""
    return set(map(_FIRST, values)) <= {ord("{")}


def small_members(raw: bytes, found: Mapping[str, Slice], dialect: Dialect) -> dict[str, bytes]:
    """What of a body matters to us beside the messages, of the members that were found."""
    mattering = ("model", *dialect.members.output, *dialect.members.prompt)
    return {key: raw[found[key].start : found[key].stop] for key in mattering if key in found}


class Named(NamedTuple):
    """What the members of a body say; see `Body`."""

    model: str
    max_output: int | None
    prompt_members: tuple[str, ...]


def named_by(rest: Mapping[str, bytes], dialect: Dialect) -> Named:
    """What `small_members` say."""
    model = _value(rest.get("model"))
    return Named(
        bounded(model) if isinstance(model, str) else "",
        _max_output(rest, dialect),
        tuple([rest[key].decode("utf-8", "replace") for key in dialect.members.prompt if key in rest]),
    )


def made(
    raw: bytes,
    place: Slice,
    late: tuple[bytes, ...],
    named: Named,
    dialect: Dialect,
    mark: bytes = b"",
    since: bytes = b"",
) -> Body:
    """A body of its parts."""
    return Body(raw, place, late, named.model, named.max_output, named.prompt_members, dialect, mark, since)


def bounded(model: str) -> str:
    """A model's name, cut to what a name can be."""
    if len(model) <= MAX_MODEL_CHARACTERS:
        return model
    return f"{model[:64]}…{hashlib.sha256(model.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def probe_body(raw: bytes, dialect: Dialect) -> bytes | None:
    """A request that costs as little as can be and is counted like this one; None if it is none."""
    fields = small(raw)
    if not isinstance(fields, dict):
        return None
    output = dialect.members.output
    named = next((each for each in output if each in fields), output[-1])
    kept = {key: value for key, value in fields.items() if key not in _NOT_PROBED and key not in output}
    return json.dumps({**kept, named: PROBE_TOKENS}).encode()


def with_output(raw: bytes, dialect: Dialect, tokens: int) -> bytes:
    """Returns a body that asks for so many tokens of output.

    The budgets of thinking become small enough to leave `LEAST_OUTPUT_TOKENS` of them for the answer, or as
    small as may be. The body is returned as it is where not even that would leave anything for the answer.
    """
    found = members(raw)
    put = dict[Slice, bytes]()
    for place in _find_budgets(raw, found, dialect):
        asked = small(raw[place.start : place.stop])
        lowered = min(asked, max(LEAST_THINKING_TOKENS, tokens - LEAST_OUTPUT_TOKENS))
        if lowered >= tokens:
            return raw
        if lowered < asked:
            put[place] = b"%d" % lowered
    for place in _find_outputs(found, dialect):
        asked = small(raw[place.start : place.stop])
        if not isinstance(asked, int) or asked > tokens:
            put[place] = b"%d" % tokens
    return _replace_slices(raw, put)


def without_output(raw: bytes, dialect: Dialect) -> bytes:
    """Returns a body in which null stands for each limit of the output and budget of thinking."""
    found = members(raw)
    places = [*_find_outputs(found, dialect), *_find_budgets(raw, found, dialect)]
    return _replace_slices(raw, dict.fromkeys(places, b"null"))


def _find_outputs(found: Mapping[str, Slice], dialect: Dialect) -> list[Slice]:
    """Returns where the limits of the output stand."""
    return [found[key] for key in dialect.members.output if key in found]


def _find_budgets(raw: bytes, found: Mapping[str, Slice], dialect: Dialect) -> list[Slice]:
    """Returns where the budgets of thinking stand that are numbers."""
    places = list[Slice]()
    for member, key in dialect.members.thinking:
        outer = found.get(member)
        if outer is None or raw[outer.start : outer.start + 1] != b"{":
            continue
        inner = members(raw[outer.start : outer.stop]).get(key)
        if inner is None:
            continue
        place = Slice(outer.start + inner.start, outer.start + inner.stop)
        if type(small(raw[place.start : place.stop])) in {int, float}:
            places.append(place)
    return places


def _max_output(rest: Mapping[str, bytes], dialect: Dialect) -> int | None:
    for key in dialect.members.output:
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
    return int(raw) if raw.isdigit() and len(raw) <= _DIGITS else small(raw)


def small(raw: bytes | None) -> Any:
    """The value of a small member; None if it is absent or cannot be read."""
    try:
        return None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None


def write(body: Body, messages: Sequence[Message]) -> bytes:
    """The client's body with other messages; every other byte is its own, but as `Dialect.suited` says."""
    return spliced(body, body.dialect.suited(body.raw, messages))


def spliced(body: Body, suited: Suited) -> bytes:
    """The client's body with a list, and members, in place of its own."""
    raw, joined = body.raw, body.dialect.joined(suited.messages)
    if raw.startswith(b'"', body.place.start) and body.messages == (joined,) and not suited.members:
        return raw  # a text that stands for a list of one is shorter than the list
    put = {body.place: b"[" + joined + b"]"}
    if suited.members:
        found = members(raw)
        put |= {found[name]: value for name, value in suited.members.items()}
    return _replace_slices(raw, put)


def _replace_slices(raw: bytes, put: Mapping[Slice, bytes]) -> bytes:
    """Returns the bytes with others in place of these slices; the same object where there are none."""
    if not put:
        return raw
    parts, done = list[bytes](), 0
    for place in sorted(put):
        parts += raw[done : place.start], put[place]
        done = place.stop
    return b"".join((*parts, raw[done:]))
