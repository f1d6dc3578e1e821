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
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.wires.json.slices import Slice, find_members
from compaction_proxy.wires.wire import AdaptedMessages, Wire

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


class RequestBody(NamedTuple):  # made for each request: a dataclass costs four times as much
    """A request body, cut up.

    Attributes:
        raw: The client's bytes.
        messages_slice: Where in them the value that holds the messages stands.
        new_pieces: Each message's bytes, as pieces; where `previous_mark` is set, only of those that came
            behind it.
        model: The model asked for; empty if the body names none.
        max_output: Largest output asked for, in tokens; None if the body does not say.
        prompt_members: The JSON of tools and the like, which count as prompt tokens.
        wire: The wire.
        mark: Names these very messages of this tenant; empty if they are not to be known again.
        previous_mark: The mark of an earlier body, which begins with the messages that are not in
            `new_pieces`; or empty.
    """

    raw: bytes
    messages_slice: Slice
    new_pieces: tuple[bytes, ...]
    model: str
    max_output: int | None
    prompt_members: tuple[str, ...]
    wire: Wire
    mark: bytes = b""
    previous_mark: bytes = b""

    @property
    def messages(self) -> tuple[bytes, ...]:
        """Each message's bytes, cut out anew where only the late ones have been."""
        if not self.previous_mark:
            return self.new_pieces
        value = memoryview(self.raw)[self.messages_slice.start : self.messages_slice.stop]
        return self.wire.to_pieces(self.wire.parse_items(value))


def parse_body(raw: bytes, wire: Wire) -> RequestBody:
    """Cut a request body up.

    Raises:
        Unreadable: It is no request that we could rewrite: `not-json`, `duplicate-keys`, `no-messages`,
            `no-array`, `too-deep`, `too-many`; or one that its dialect wants left as it is.
    """
    found, listed = split_body(raw, wire)
    place = found[wire.member_names.messages]
    return build_body(
        raw, place, wire.to_pieces(listed), parse_options(pick_small_members(raw, found, wire), wire), wire
    )


def split_body(raw: bytes, wire: Wire) -> tuple[dict[str, Slice], tuple[bytes, ...]]:
    """Where the members of a body stand, and the elements of its messages.

    Raises:
        Unreadable: See `parse_body`.
    """
    try:
        found = find_members(raw)
        place = found.get(wire.member_names.messages)
        listed = wire.parse_items(memoryview(raw)[place.start : place.stop]) if place else ()
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    if len(listed) > MAX_MESSAGES:
        raise UnreadableBodyError("too-many")
    if not listed:
        raise UnreadableBodyError("no-messages")
    telling = {
        key: raw[found[key].start : found[key].stop]
        for key in wire.member_names.skip_indicators
        if key in found
    }
    if telling and (reason := wire.find_skip_reason(telling)):
        raise UnreadableBodyError(reason)
    return found, listed


def are_objects(values: Iterable[bytes]) -> bool:
    """Whether each of these JSON values is an object."""
    return set(map(_FIRST, values)) <= {ord("{")}


def pick_small_members(raw: bytes, member_slices: Mapping[str, Slice], wire: Wire) -> dict[str, bytes]:
    """What of a body matters to us beside the messages, of the members that were found."""
    mattering = ("model", *wire.member_names.output, *wire.member_names.prompt)
    return {
        key: raw[member_slices[key].start : member_slices[key].stop]
        for key in mattering
        if key in member_slices
    }


class BodyOptions(NamedTuple):
    """What the members of a body say; see `RequestBody`."""

    model: str
    max_output: int | None
    prompt_members: tuple[str, ...]


def parse_options(rest: Mapping[str, bytes], wire: Wire) -> BodyOptions:
    """What `pick_small_members` say."""
    model = _decode_member(rest.get("model"))
    return BodyOptions(
        shorten_model_name(model) if isinstance(model, str) else "",
        _find_max_output(rest, wire),
        tuple([rest[key].decode("utf-8", "replace") for key in wire.member_names.prompt if key in rest]),
    )


def build_body(
    raw: bytes,
    messages_slice: Slice,
    new_pieces: tuple[bytes, ...],
    options: BodyOptions,
    wire: Wire,
    mark: bytes = b"",
    previous_mark: bytes = b"",
) -> RequestBody:
    """A body of its parts."""
    return RequestBody(
        raw,
        messages_slice,
        new_pieces,
        options.model,
        options.max_output,
        options.prompt_members,
        wire,
        mark,
        previous_mark,
    )


def shorten_model_name(model: str) -> str:
    """A model's name, cut to what a name can be."""
    if len(model) <= MAX_MODEL_CHARACTERS:
        return model
    return f"{model[:64]}…{hashlib.sha256(model.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def build_probe_body(raw: bytes, wire: Wire) -> bytes | None:
    """A request that costs as little as can be and is counted like this one; None if it is none."""
    fields = decode_small(raw)
    if not isinstance(fields, dict):
        return None
    output = wire.member_names.output
    named = next((each for each in output if each in fields), output[-1])
    remaining = {key: value for key, value in fields.items() if key not in _NOT_PROBED and key not in output}
    return json.dumps({**remaining, named: PROBE_TOKENS}).encode()


def set_output_limit(raw: bytes, wire: Wire, tokens: int) -> bytes:
    """Returns a body that asks for so many tokens of output.

    The budgets of thinking become small enough to leave `LEAST_OUTPUT_TOKENS` of them for the answer, or as
    small as may be. The body is returned as it is where not even that would leave anything for the answer.
    """
    found = find_members(raw)
    put = dict[Slice, bytes]()
    for place in _find_budgets(raw, found, wire):
        asked = decode_small(raw[place.start : place.stop])
        lowered = min(asked, max(LEAST_THINKING_TOKENS, tokens - LEAST_OUTPUT_TOKENS))
        if lowered >= tokens:
            return raw
        if lowered < asked:
            put[place] = b"%d" % lowered
    for place in _find_outputs(found, wire):
        asked = decode_small(raw[place.start : place.stop])
        if not isinstance(asked, int) or asked > tokens:
            put[place] = b"%d" % tokens
    return _replace_slices(raw, put)


def clear_output_limits(raw: bytes, wire: Wire) -> bytes:
    """Returns a body in which null stands for each limit of the output and budget of thinking."""
    found = find_members(raw)
    places = [*_find_outputs(found, wire), *_find_budgets(raw, found, wire)]
    return _replace_slices(raw, dict.fromkeys(places, b"null"))


def _find_outputs(member_slices: Mapping[str, Slice], wire: Wire) -> list[Slice]:
    """Returns where the limits of the output stand."""
    return [member_slices[key] for key in wire.member_names.output if key in member_slices]


def _find_budgets(raw: bytes, member_slices: Mapping[str, Slice], wire: Wire) -> list[Slice]:
    """Returns where the budgets of thinking stand that are numbers."""
    places = list[Slice]()
    for member, key in wire.member_names.thinking_budgets:
        outer = member_slices.get(member)
        if outer is None or raw[outer.start : outer.start + 1] != b"{":
            continue
        inner = find_members(raw[outer.start : outer.stop]).get(key)
        if inner is None:
            continue
        place = Slice(outer.start + inner.start, outer.start + inner.stop)
        if type(decode_small(raw[place.start : place.stop])) in {int, float}:
            places.append(place)
    return places


def _find_max_output(rest: Mapping[str, bytes], wire: Wire) -> int | None:
    for key in wire.member_names.output:
        asked = _decode_member(rest[key]) if key in rest else None
        if type(asked) is int and asked > 0:
            return asked
    return None


def _decode_member(raw: bytes | None) -> Any:
    """The value of a small member that is known to be JSON; plain strings and numbers without a decoder."""
    if raw is None:
        return None
    if raw.startswith(b'"') and b"\\" not in raw:
        return raw[1:-1].decode()
    return int(raw) if raw.isdigit() and len(raw) <= _DIGITS else decode_small(raw)


def decode_small(raw: bytes | None) -> Any:
    """The value of a small member; None if it is absent or cannot be read."""
    try:
        return None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None


def rewrite_messages(body: RequestBody, messages: Sequence[Message]) -> bytes:
    """The client's body with other messages; every other byte is its own, but as `Wire.suited` says."""
    return splice_messages(body, body.wire.adapt_for_provider(body.raw, messages))


def splice_messages(body: RequestBody, adapted: AdaptedMessages) -> bytes:
    """The client's body with a list, and members, in place of its own."""
    raw, joined = body.raw, body.wire.join_messages(adapted.messages)
    if raw.startswith(b'"', body.messages_slice.start) and body.messages == (joined,) and not adapted.members:
        return raw  # a text that stands for a list of one is shorter than the list
    put = {body.messages_slice: b"[" + joined + b"]"}
    if adapted.members:
        found = find_members(raw)
        put |= {found[name]: value for name, value in adapted.members.items()}
    return _replace_slices(raw, put)


def _replace_slices(raw: bytes, replacements: Mapping[Slice, bytes]) -> bytes:
    """Returns the bytes with others in place of these slices; the same object where there are none."""
    if not replacements:
        return raw
    parts, done = list[bytes](), 0
    for place in sorted(replacements):
        parts += raw[done : place.start], replacements[place]
        done = place.stop
    return b"".join((*parts, raw[done:]))
