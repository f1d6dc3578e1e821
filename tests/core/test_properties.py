"""What holds of any conversation: nothing orphaned, nothing privileged lost, bytes frozen, limits kept."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.checkpoint import Checkpoint, covered_results, exact_digest, from_fields, stands, to_fields
from proxy.core.digest import message_digest
from proxy.core.ladder import GONE, WHOLE, squeeze
from proxy.core.message import Call, Message, latest_user, units
from proxy.core.planner import Plan, plan
from proxy.core.policy import CHAINED, Policy
from proxy.core.render import render
from proxy.core.repair import alternate, repair

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

IDS = st.sampled_from(["a", "b", ""])  # few, so that they are reused all the time
TEXTS = st.sampled_from(["", "x", "yy"])
TOKENS = st.integers(1, 2_000)
KINDS = {
    "system": st.builds(Message, st.just("system"), TEXTS, tokens=TOKENS),
    "developer": st.builds(Message, st.just("developer"), TEXTS, tokens=TOKENS),
    "user": st.builds(Message, st.just("user"), TEXTS, tokens=TOKENS),
    "assistant": st.builds(
        Message,
        st.just("assistant"),
        TEXTS,
        calls=st.lists(st.builds(Call, IDS, st.just("read"), st.just("{}")), max_size=3).map(tuple),
        tokens=TOKENS,
    ),
    "tool": st.builds(Message, st.just("tool"), TEXTS, answers=st.tuples(IDS), tokens=TOKENS),
}


@st.composite
def conversations(draw: st.DrawFn, min_size: int = 0, max_size: int = 24) -> list[Message]:
    """Any list of messages, valid or not, each with a name and bytes of its own."""
    drawn = draw(st.lists(st.one_of(*KINDS.values()), min_size=min_size, max_size=max_size))
    named = [replace(message, name=str(index), raw=b"%d" % index) for index, message in enumerate(drawn)]
    return [replace(message, digest=message_digest(message)) for message in named]


POLICIES = st.integers(1, 6).map(lambda keep: replace(CHAINED, keep_messages=keep))


def body_of(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not message.privileged]


def privileged(messages: Sequence[Message]) -> list[bytes]:
    return [message.raw for message in messages if message.privileged]


def taken(made: Plan, body: Sequence[Message]) -> Checkpoint:
    """The checkpoint of a plan, as a round makes it."""
    stand_in = Message("assistant", f"round {made.round}", raw=b"round %d" % made.round, tokens=9)
    return Checkpoint(
        strategy="chained",
        conversation="c_1",
        round=made.round,
        length=made.length,
        exact=exact_digest(body[: made.length]),
        results=covered_results(body, made.spans),
        spans=made.spans,
        stand_ins=(stand_in, *(None for _ in made.spans[1:])),
        summary=f"round {made.round}",
        tokens_before=0,
        tokens_after=0,
        listed=len(body),
    )


def next_round(messages: Sequence[Message], policy: Policy, earlier: Checkpoint | None) -> Checkpoint | None:
    """The round that a request makes, as the compactor makes it."""
    body = body_of(messages)
    if earlier is not None and not stands(earlier, body):
        earlier = None
    made = plan(body, effective(messages, earlier), policy, earlier)
    return taken(made, body) if made else earlier


def effective(messages: Sequence[Message], checkpoint: Checkpoint | None) -> tuple[Message, ...]:
    return render(messages, checkpoint.spans, checkpoint.stand_ins) if checkpoint else tuple(messages)


def paired(messages: Sequence[Message]) -> bool:
    """Whether each call has exactly one result, right behind it."""
    open_calls: list[str] = []
    for message in messages:
        if message.answers:
            if message.answers[0] not in open_calls:
                return False
            open_calls.remove(message.answers[0])
            continue
        if open_calls:
            return False
        open_calls = [call.id for call in message.calls]
    return not open_calls


@UNHURRIED
@given(conversations())
def test_units_partition_any_list(messages: list[Message]) -> None:
    spans = list(units(messages))

    assert [index for span in spans for index in range(span.start, span.stop)] == list(range(len(messages)))
    assert all(span.start < span.stop for span in spans)
    assert all(not messages[index].calls for span in spans for index in range(span.start + 1, span.stop))


@UNHURRIED
@given(conversations(), POLICIES, st.lists(st.integers(0, 24), max_size=3))
def test_after_any_rounds_calls_are_paired_and_what_may_not_change_has_not(
    messages: list[Message], policy: Policy, requests: list[int]
) -> None:
    checkpoint = None
    for length in sorted(requests):
        checkpoint = next_round(messages[:length], policy, checkpoint)
    if checkpoint is not None and not stands(checkpoint, body_of(messages)):
        checkpoint = None
    sent = repair(effective(messages, checkpoint))

    assert paired(sent)
    assert privileged(sent) == privileged(messages)
    latest = latest_user(messages)
    assert latest is None or sent.count(messages[latest]) == 1
    assert all(
        message in messages for message in sent if message.raw and not message.raw.startswith(b"round")
    )


@UNHURRIED
@given(conversations(min_size=3), POLICIES)
def test_spans_are_sorted_and_disjoint_and_stand_on_the_edges_of_units(
    messages: list[Message], policy: Policy
) -> None:
    body = body_of(messages)
    made = plan(body, messages, policy, None)
    edges = {edge for unit in units(body) for edge in unit}
    flat = [edge for span in made.spans for edge in span] if made else []

    assert flat == sorted(flat)
    assert all(span.start < span.stop for span in (made.spans if made else ()))
    assert edges.issuperset(flat)
    assert made is None or (made.length in edges and made.spans[-1].stop <= made.length)
    assert made is None or latest_user(body) not in made.fresh


@UNHURRIED
@given(conversations(min_size=6), conversations(), POLICIES)
def test_what_stands_before_the_tail_is_frozen_while_the_list_grows(
    messages: list[Message], more: list[Message], policy: Policy
) -> None:
    checkpoint = next_round(messages, policy, None)
    grown = [*messages, *more]
    later = body_of(more)
    before, after = effective(messages, checkpoint), effective(grown, checkpoint)

    assert [each.raw for each in after[: len(before)]] == [each.raw for each in before]
    assert body_of(after)[len(body_of(before)) :] == later
    assert checkpoint is None or stands(checkpoint, body_of(grown))


@UNHURRIED
@given(conversations(min_size=6), POLICIES)
def test_a_stored_checkpoint_renders_the_same_bytes(messages: list[Message], policy: Policy) -> None:
    checkpoint = next_round(messages, policy, None)
    stored = from_fields(to_fields(checkpoint)) if checkpoint else None

    assert stored == checkpoint
    assert [each.raw for each in effective(messages, stored)] == [
        each.raw for each in effective(messages, checkpoint)
    ]


@UNHURRIED
@given(conversations(min_size=6), POLICIES, st.data())
def test_a_checkpoint_stands_for_no_list_with_a_covered_message_changed(
    messages: list[Message], policy: Policy, data: st.DataObject
) -> None:
    body = body_of(messages)
    checkpoint = next_round(messages, policy, None)
    if checkpoint is None:
        return
    at = data.draw(st.integers(0, checkpoint.length - 1))
    edited = replace(body[at], text=body[at].text + "!")
    changed = [*body[:at], replace(edited, digest=message_digest(edited)), *body[at + 1 :]]

    assert stands(checkpoint, body)
    assert not stands(checkpoint, changed)
    assert not stands(checkpoint, [*body[:at], *body[at + 1 :]])
    assert not stands(checkpoint, body[: checkpoint.length - 1])


@UNHURRIED
@given(conversations())
def test_repairing_twice_is_repairing_once(messages: list[Message]) -> None:
    once = repair(messages)

    assert paired(once)
    assert privileged(once) == privileged(messages)
    assert repair(once) == once


@UNHURRIED
@given(conversations())
def test_alternation_really_alternates_and_adds_only(messages: list[Message]) -> None:
    repaired = repair(messages)
    made = alternate(repaired)
    speakers = ["assistant" if each.role == "assistant" else "user" for each in body_of(made)]
    turns = [
        speaker
        for index, speaker in enumerate(speakers)
        if not (index and body_of(made)[index].answers and speakers[index - 1] == "user")
    ]

    assert turns == ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]
    assert [each for each in made if each.raw] == [each for each in repaired if each.raw]
    assert alternate(made) == made


@UNHURRIED
@given(conversations(), st.integers(0, 20_000), st.integers(0, 20_000), st.data())
def test_the_floor_of_the_ladder_keeps_its_promises(
    messages: list[Message], limit: int, most: int, data: st.DataObject
) -> None:
    listed = repair(messages)
    mine = data.draw(st.sets(st.sampled_from(range(len(listed))), max_size=2)) if listed else set()
    ours = frozenset(k for k in mine if listed[k].role == "assistant" and not listed[k].calls)
    squeezed = squeeze(listed, limit, ours, most)
    sizes = [
        message.tokens if allowed is WHOLE else min(allowed, message.tokens)
        for message, allowed in zip(listed, squeezed.allowances, strict=True)
    ]
    latest = latest_user([each for k, each in enumerate(listed) if k not in ours])
    theirs = [k for k in range(len(listed)) if k not in ours]
    gone = {k for k, allowed in enumerate(squeezed.allowances) if allowed == GONE}

    assert not squeezed.fits or sum(sizes) <= max(limit, most)
    assert all(squeezed.allowances[k] is WHOLE for k, each in enumerate(listed) if each.privileged)
    assert latest is None or squeezed.allowances[theirs[latest]] is WHOLE
    assert all(squeezed.allowances[k] != GONE for k in ours)
    assert paired([each for k, each in enumerate(listed) if k not in gone])
