"""Splits a request body of any wire, and builds bodies with other messages or other output limits.

The proxy does not check bodies against a schema. In a body with other messages or limits, all other members
keep the client's bytes, except those that must change together with the messages. The module also builds the
bodies of probes. For a probe, it decodes the client's whole body and encodes it anew.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from compaction_proxy.core.budget import MIN_OUTPUT_TOKENS
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.wires.json.slices import Slice, find_members, split_elements
from compaction_proxy.wires.wire import AdaptedMessages, Wire

# The proxy does not change a body if its list of messages has more elements than this, because no model could
# read such a conversation.
MAX_MESSAGES = 100_000
# Maximum number of characters of a model name. `shorten_model_name` replaces a longer name by its beginning
# and a digest, to save memory and log space. No model has such a long name.
MAX_MODEL_CHARACTERS = 256
# The output limit of a probe, in tokens. A probe is a copy of a request that the proxy sends only so that the
# provider counts the tokens of the request.
PROBE_TOKENS = 16
# The smallest thinking budget that Anthropic accepts, in tokens.
LEAST_THINKING_TOKENS = 1_024
_MEMBERS_NOT_PROBED = frozenset({"stream", "stream_options", "n"})


class RequestBody(NamedTuple):  # not a dataclass, because creating one takes four times as long
    """A request body, split into its parts.

    Attributes:
        raw: The whole body, as the client sent it.
        messages_slice: The position in `raw` of the list of messages.
        new_pieces: The bytes of each message, without the messages that an earlier body with the fingerprint
            `previous_fingerprint` contains.
        model: The requested model; empty if the body names none.
        max_output: The output limit that the client sets, in tokens; None if the body sets none.
        prompt_members: The JSON of the other members that count as prompt tokens, such as tools.
        wire: The wire of the request.
        fingerprint: A keyed digest of the bytes up to the end of the last message. With it,
            `IncrementalReader` recognises later bodies that begin with the same bytes. Empty if the reader
            does not remember this body.
        previous_fingerprint: The `fingerprint` of the earlier body that contains the messages omitted from
            `new_pieces`; empty if no messages are omitted.
    """

    raw: bytes
    messages_slice: Slice
    new_pieces: tuple[bytes, ...]
    model: str
    max_output: int | None
    prompt_members: tuple[str, ...]
    wire: Wire
    fingerprint: bytes = b""
    previous_fingerprint: bytes = b""

    @property
    def messages(self) -> tuple[bytes, ...]:
        """The bytes of each message, earlier messages included.

        If `new_pieces` omits earlier messages, the property splits `raw` again.
        """
        if not self.previous_fingerprint:
            return self.new_pieces
        value = memoryview(self.raw)[self.messages_slice.start : self.messages_slice.stop]
        return self.wire.group_into_pieces(self.wire.split_message_list(value))


def parse_body(raw: bytes, wire: Wire) -> RequestBody:
    """Splits a request body into the parts of a `RequestBody`.

    Raises:
        UnreadableBodyError: If the proxy cannot rewrite the body. Its `reason` is `not-json`,
            `duplicate-keys`, `no-messages`, `no-array`, `too-deep`, `too-many`, or the result of the wire's
            `find_skip_reason`.
    """
    members, elements = split_body(raw, wire)
    options = parse_options(pick_small_members(raw, members, wire), wire)
    place = members[wire.member_names.messages]
    return RequestBody(raw, place, wire.group_into_pieces(elements), *options, wire)


def split_body(raw: bytes, wire: Wire) -> tuple[dict[str, Slice], tuple[bytes, ...]]:
    """Returns the positions of a body's members by name, and the elements of its list of messages.

    Raises:
        UnreadableBodyError: In the same cases as `parse_body`.
    """
    found = find_members(raw)
    place = found.get(wire.member_names.messages)
    elements = wire.split_message_list(memoryview(raw)[place.start : place.stop]) if place else ()
    if len(elements) > MAX_MESSAGES:
        raise UnreadableBodyError("too-many")
    if not elements:
        raise UnreadableBodyError("no-messages")
    indicators = _pick_members(raw, found, wire.member_names.skip_indicators)
    if indicators and (reason := wire.find_skip_reason(indicators)):
        raise UnreadableBodyError(reason)
    return found, elements


def are_objects(values: Iterable[bytes]) -> bool:
    """Returns whether all of these JSON values are objects."""
    return all(value.startswith(b"{") for value in values)


def split_objects(value: memoryview) -> tuple[bytes, ...]:
    """Splits an array of objects into its elements.

    Raises:
        UnreadableBodyError: With the reason `no-array` if the value is not an array. With the reason
            `no-messages` if an element is not an object. Other reasons come from
            `json.slices.split_elements`.
    """
    elements = split_elements(value)
    if not are_objects(elements):
        raise UnreadableBodyError("no-messages")
    return elements


def pick_small_members(raw: bytes, member_slices: Mapping[str, Slice], wire: Wire) -> dict[str, bytes]:
    """Returns the JSON of the members from which `parse_options` reads a request's options, by name.

    These are the model, the output limits, and the members that count as prompt tokens, such as tools. The
    result does not contain members that the body does not have.
    """
    names = ("model", *wire.member_names.output_limits, *wire.member_names.prompt_members)
    return _pick_members(raw, member_slices, names)


def _pick_members(raw: bytes, member_slices: Mapping[str, Slice], names: Sequence[str]) -> dict[str, bytes]:
    return {
        key: raw[member_slices[key].start : member_slices[key].stop] for key in names if key in member_slices
    }


def _decode_option(raw: bytes | None) -> Any:
    """Decodes a model name or an output limit.

    Short values are cached, because most requests of a conversation have the same values.
    """
    is_short = raw is not None and len(raw) <= MAX_MODEL_CHARACTERS
    return _decode_short_option(raw) if is_short else decode_small_json(raw)


def parse_options(members: Mapping[str, bytes], wire: Wire) -> tuple[str, int | None, tuple[str, ...]]:
    """Parses the members that `pick_small_members` returns.

    Returns values for the fields `model`, `max_output` and `prompt_members` of `RequestBody`.
    """
    model = _decode_option(members.get("model"))
    limits = [_decode_option(members.get(key)) for key in wire.member_names.output_limits]
    prompt_members = [members[key] for key in wire.member_names.prompt_members if key in members]
    return (
        shorten_model_name(model) if isinstance(model, str) else "",
        next((limit for limit in limits if type(limit) is int and limit > 0), None),
        tuple([member.decode("utf-8", "replace") for member in prompt_members]),
    )


def shorten_model_name(model: str) -> str:
    """Returns the name of a model unchanged if it has at most `MAX_MODEL_CHARACTERS` characters.

    Otherwise, returns the first 64 characters of the name and a digest of the whole name.
    """
    if len(model) <= MAX_MODEL_CHARACTERS:
        return model
    return f"{model[:64]}…{hashlib.sha256(model.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def build_probe_body(raw: bytes, wire: Wire) -> bytes | None:
    """Builds the body of a probe: a copy of a request body with the output limit `PROBE_TOKENS`.

    The copy asks for a single response that is not a stream. Returns None if `raw` is not a JSON object.
    """
    fields = decode_small_json(raw)
    if not isinstance(fields, dict):
        return None
    output = wire.member_names.output_limits
    limit_name = next((each for each in output if each in fields), output[-1])
    remaining = {
        key: value for key, value in fields.items() if key not in _MEMBERS_NOT_PROBED and key not in output
    }
    return json.dumps({**remaining, limit_name: PROBE_TOKENS}).encode()


def lower_output_limits(raw: bytes, wire: Wire, max_tokens: int) -> bytes:
    """Returns the body with its output limits lowered to at most `max_tokens`.

    Thinking tokens count towards the output limit. So the function also lowers each thinking budget, to leave
    `MIN_OUTPUT_TOKENS` for the reply, but not below `LEAST_THINKING_TOKENS`. If such a budget would leave no
    token for the reply, the function returns the body unchanged.
    """
    limits, budgets = _find_limits(raw, wire)
    replacements = dict[Slice, bytes]()
    for place in budgets:
        requested = decode_small_json(raw[place.start : place.stop])
        lowered = min(requested, max(LEAST_THINKING_TOKENS, max_tokens - MIN_OUTPUT_TOKENS))
        if lowered >= max_tokens:
            return raw
        if lowered < requested:
            replacements[place] = b"%d" % lowered
    for place in limits:
        requested = decode_small_json(raw[place.start : place.stop])
        if not isinstance(requested, int) or requested > max_tokens:
            replacements[place] = b"%d" % max_tokens
    return _replace_slices(raw, replacements)


def clear_output_limits(raw: bytes, wire: Wire) -> bytes:
    """Returns the body with null as the value of each output limit and each thinking budget."""
    limits, budgets = _find_limits(raw, wire)
    return _replace_slices(raw, dict.fromkeys([*limits, *budgets], b"null"))


def _find_limits(raw: bytes, wire: Wire) -> tuple[list[Slice], list[Slice]]:
    """Returns the positions of all output limits, and of those thinking budgets whose value is a number."""
    members, budgets = find_members(raw), list[Slice]()
    for member, key in wire.member_names.thinking_budgets:
        outer = members.get(member)
        if outer is None or not raw.startswith(b"{", outer.start):
            continue
        inner = find_members(raw[outer.start : outer.stop]).get(key)
        if inner is None:
            continue
        place = Slice(outer.start + inner.start, outer.start + inner.stop)
        if type(decode_small_json(raw[place.start : place.stop])) in {int, float}:
            budgets.append(place)
    return [members[key] for key in wire.member_names.output_limits if key in members], budgets


def decode_small_json(raw: bytes | None) -> Any:
    """Decodes the JSON of a small member. Returns None if `raw` is None or invalid."""
    try:
        return None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None


_decode_short_option = lru_cache(maxsize=1_024)(decode_small_json)


def rewrite_messages(body: RequestBody, messages: Sequence[Message]) -> bytes:
    """Returns the client's body with these messages in place of its own.

    The function `adapt_for_provider` of the wire first changes the messages so that the provider accepts
    them. It also changes the members that must change together with the messages.
    """
    return splice_messages(body, body.wire.adapt_for_provider(body.raw, messages))


def splice_messages(body: RequestBody, adapted: AdaptedMessages) -> bytes:
    """Returns the client's body with its messages and some other members replaced by those in `adapted`."""
    raw, joined = body.raw, body.wire.join_messages(adapted.messages)
    if raw.startswith(b'"', body.messages_slice.start) and body.messages == (joined,) and not adapted.members:
        return raw  # the body contains its only message as a string, and this message is unchanged
    replacements = {body.messages_slice: b"[" + joined + b"]"}
    if adapted.members:
        member_slices = find_members(raw)
        replacements |= {member_slices[name]: value for name, value in adapted.members.items()}
    return _replace_slices(raw, replacements)


def _replace_slices(raw: bytes, replacements: Mapping[Slice, bytes]) -> bytes:
    """Returns the bytes with each slice replaced by its new value; `raw` itself without replacements."""
    if not replacements:
        return raw
    parts, done = list[bytes](), 0
    for place in sorted(replacements):
        parts += raw[done : place.start], replacements[place]
        done = place.stop
    return b"".join((*parts, raw[done:]))
