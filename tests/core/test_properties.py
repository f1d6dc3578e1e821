"""What holds of any conversation, for every strategy, seen as the proxy sees it: request by request."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.checkpoint import (
    Checkpoint,
    can_apply_checkpoint,
    find_longest_applicable_checkpoint,
    from_fields,
    to_fields,
)
from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.masking import order_results_to_mask
from compaction_proxy.core.message import (
    ContentPart,
    Message,
    MessageToolCall,
    find_latest_user_message,
    iter_units,
)
from compaction_proxy.core.planner import (
    PlanConstraints,
    RoundPlan,
    add_edits,
    build_unchanged_plan,
    find_task_index,
    list_chain_records,
    list_forwarded_sizes,
    plan_round,
)
from compaction_proxy.core.render import build_effective_list
from compaction_proxy.core.repair import insert_alternating_fillers, repair_messages
from compaction_proxy.core.strategies import STRATEGIES, Policy
from compaction_proxy.core.truncate import KEEP_WHOLE, LEAVE_OUT, plan_truncation

FULL_RUN = settings.get_current_profile_name() == "full"
# The machine may be busy.
UNHURRIED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    max_examples=10_000 if FULL_RUN else 250,
)
pytestmark = pytest.mark.timeout(3_600 if FULL_RUN else 240)

AsCheckpoint = Callable[[RoundPlan, Sequence[Message], Policy, Checkpoint | None], Checkpoint]
every_strategy = pytest.mark.parametrize("name", STRATEGIES)

TOKENS = (1, 30, 200, 900)
IDS = ("a", "b", "")  # few, so that they are reused all the time
IMAGE = ContentPart("image_url", bytes(32), 0)


# Conversations


def exchange(names: Sequence[str], text: str, *, unanswered: int = 0) -> list[Message]:
    """A message with calls, and their results but for the last `unanswered`."""
    calls = tuple(MessageToolCall(name, "read", f'{{"path": "{text}"}}') for name in names)
    answers = [Message("tool", f"{text}: a line\nand more", answered_call_ids=(name,)) for name in names]
    return [Message("assistant", text, calls=calls), *answers[: len(names) - unanswered]]


def spoken(kind: int, text: str) -> list[Message]:
    """One or several messages, by a number 0..15: mostly what clients send, some of it broken."""
    one, other = IDS[kind % 3], IDS[(kind + 1) % 3]
    return (
        [Message("system", text)],
        [Message("developer", text)],
        [Message("user", text)],
        [Message("user", text)],
        [Message("user", text, parts=(IMAGE,))],
        [Message("assistant", text)],
        [Message("assistant", text)],
        exchange([one], text),
        exchange([one], text),
        exchange([one, other], text),
        exchange([one, other, one], text),
        [*exchange([one, other], text, unanswered=1)],
        exchange([one], text, unanswered=1),
        [Message("tool", text, answered_call_ids=(one,))],
        [Message("assistant")],
        [Message("user", text, answered_call_ids=(one,))],
    )[kind]


def digested(message: Message) -> Message:
    return replace(message, digest=compute_message_digest(message))


def conversation(data: bytes, first: int = 0) -> list[Message]:
    """Messages for some bytes; each has a name and bytes of its own, numbered from `first`."""
    drawn = [
        replace(message, tokens=TOKENS[byte >> 6])
        for at, byte in enumerate(data)
        for message in spoken(byte % 16, f"{first + at}.{byte} ")
    ]
    named = [replace(each, name=f"{first}.{at}") for at, each in enumerate(drawn)]
    return [digested(replace(each, raw=f"{each.role} {each.name}".encode())) for each in named]


def conversations(size: int = 30) -> st.SearchStrategy[list[Message]]:
    return st.binary(max_size=size).map(conversation)


def body_of(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not message.is_privileged]


def raws(messages: Sequence[Message]) -> list[bytes]:
    return [message.raw for message in messages]


def privileged(messages: Sequence[Message]) -> list[bytes]:
    return raws([message for message in messages if message.is_privileged])


def paired(messages: Sequence[Message]) -> bool:
    """Whether each call has exactly one result, right behind it."""
    open_calls: list[str] = []
    for message in messages:
        if message.answered_call_ids:
            if message.answered_call_ids[0] not in open_calls:
                return False
            open_calls.remove(message.answered_call_ids[0])
            continue
        if open_calls:
            return False
        open_calls = [call.id for call in message.calls]
    return not open_calls


# What clients do from request to request


@dataclass(frozen=True)
class Step:
    """What a client does before its next request.

    Attributes:
        act: `grow`, `retry`, `edit` one message, `branch` off from one, `clear` old tool results.
        at: Which message, as a share of the list, 0..255.
        data: What comes new.
        masked: Whether the proxy then shortens old results instead of making a round.
    """

    act: str
    at: int
    data: bytes
    masked: bool

    def done(self, messages: list[Message], first: int) -> list[Message]:
        """The client's list after it."""
        at = self.at * len(messages) // 256
        if self.act == "retry" or not messages:
            return messages
        if self.act == "edit":
            edited = replace(messages[at], text=messages[at].text + f"edited {first}")
            return [*messages[:at], digested(edited), *messages[at + 1 :]]
        if self.act == "clear":
            return [
                digested(replace(each, text="")) if each.answered_call_ids and k < at else each
                for k, each in enumerate(messages)
            ]
        new = conversation(self.data, first)
        return [*messages[:at], *new] if self.act == "branch" else [*messages, *new]


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["grow", "grow", "grow", "retry", "edit", "branch", "clear"]),
        st.integers(0, 255),
        st.binary(min_size=1, max_size=12),
        st.booleans(),
    ),
    max_size=5,
)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[Message], bool]]:
    """What one client sends in turn, and whether the proxy then shortens results."""
    messages = draw(conversations())
    sent = [(messages, False)]
    for number, step in enumerate(draw(STEPS), 1):
        messages = step.done(messages, 1_000 * number)
        sent.append((messages, step.masked))
    return sent


@st.composite
def policies(draw: st.DrawFn, name: str) -> Policy:
    """A row, as it is or small enough for short conversations to be compacted often."""
    row = STRATEGIES[name]
    keep = draw(st.none() | st.integers(1, 6))
    if keep is None or not row.keep.messages:
        return replace(row, one_run=draw(st.booleans()))
    least = keep + 1 if row.least_messages > 1 else 1
    return replace(row, keep=replace(row.keep, messages=keep), least_messages=least)


# The proxy


@dataclass(frozen=True)
class Answer:
    """What the proxy did with one request.

    Attributes:
        messages: What came.
        body: Of that, what is not privileged.
        earlier: The checkpoint that was applied.
        made: The plan, if there was one.
        checkpoint: What holds after it.
        effective: The list with that applied.
    """

    messages: list[Message]
    body: list[Message]
    earlier: Checkpoint | None
    made: RoundPlan | None
    checkpoint: Checkpoint | None
    effective: tuple[Message, ...]


@dataclass
class Proxy:
    """A proxy that compacts whenever it can and keeps every checkpoint."""

    policy: Policy
    trigger: int
    as_checkpoint: AsCheckpoint
    at: int = 0  # where a check changes something, as a share of the list, 0..255
    more: bytes = b"\x02"  # what a check lets a list grow by
    stored: list[Checkpoint] = field(default_factory=list)

    def room(self, effective: Sequence[Message]) -> PlanConstraints:
        target = self.policy.target.compute_tokens(self.trigger) if self.policy.target else None
        return PlanConstraints(
            self.trigger, target, sum(each.tokens for each in effective), replacement_tokens=20
        )

    def planned(self, messages: list[Message], earlier: Checkpoint | None) -> RoundPlan | None:
        effective = applied(messages, earlier)
        return plan_round(body_of(messages), effective, self.policy, earlier, self.room(effective))

    def answer(self, messages: list[Message], *, mask: bool = False) -> Answer:
        body = body_of(messages)
        earlier = find_longest_applicable_checkpoint(self.stored, body)
        made = masked(body, earlier) if mask else self.planned(messages, earlier)
        checkpoint = earlier
        if made:
            checkpoint = self.as_checkpoint(made, body, self.policy, earlier)
            self.stored.append(checkpoint)
        return Answer(messages, body, earlier, made, checkpoint, applied(messages, checkpoint))


def applied(messages: Sequence[Message], checkpoint: Checkpoint | None) -> tuple[Message, ...]:
    if checkpoint is None:
        return tuple(messages)
    return build_effective_list(messages, checkpoint.spans, checkpoint.stand_ins, checkpoint.edited)


def masked(body: Sequence[Message], earlier: Checkpoint | None) -> RoundPlan | None:
    """Two results that are still there shortened where they stand: one masked, one capped."""
    away = (earlier.removed_indices | earlier.edited) if earlier else frozenset()
    there = [index for index, each in enumerate(body) if each.answered_call_ids and index not in away]
    kinds = dict(zip(order_results_to_mask(body, there), ("mask", "cap"), strict=False))
    return add_edits(build_unchanged_plan(earlier), kinds) if kinds else None  # type: ignore[arg-type] # from literals


TRIGGERS = st.sampled_from([100, 1_000, 6_000])


def answers(data: st.DataObject, name: str, as_checkpoint: AsCheckpoint) -> Iterator[tuple[Proxy, Answer]]:
    """What the proxy does with each request of some client."""
    policy, trigger = data.draw(policies(name)), data.draw(TRIGGERS)
    at, more = data.draw(st.integers(0, 255)), data.draw(st.binary(min_size=1, max_size=6))
    proxy = Proxy(policy, trigger, as_checkpoint, at, more)
    for messages, mask in data.draw(requests()):
        yield proxy, proxy.answer(messages, mask=mask)


# What holds of every answer, for every strategy


def calls_are_paired_and_what_may_not_change_has_not(proxy: Proxy, answer: Answer) -> None:
    repaired = repair_messages(answer.effective)
    ours = [each for each in repaired if each.is_privileged and each.text.startswith("[Previous")]

    assert paired(repaired)
    assert privileged([each for each in repaired if each not in ours]) == privileged(answer.messages)
    assert not ours or proxy.policy.name == "split"
    theirs = [each for each in raws(answer.effective) if each in set(raws(answer.body))]
    assert theirs == [each for each in raws(answer.body) if each in set(theirs)]


def the_latest_user_message_is_there_word_for_word(proxy: Proxy, answer: Answer) -> None:
    latest = find_latest_user_message(answer.body)
    if latest is None:
        return
    message = answer.body[latest]
    carried = answer.checkpoint is not None and answer.checkpoint.carried == latest
    if not carried:
        assert repair_messages(answer.effective).count(message) == 1
    else:
        assert proxy.policy.name == "full"
        assert message not in answer.effective
        assert any(
            each.text.endswith(f"\n\n{proxy.policy.frame.request_introduction}{message.text}")
            for each in answer.effective
        )


def what_was_to_stay_is_never_taken(proxy: Proxy, answer: Answer) -> None:
    made, body, keep = answer.made, answer.body, proxy.policy.keep
    if made is None or not made.removed_indices:
        return
    taken = set(made.removed_indices) - (answer.earlier.removed_indices if answer.earlier else set())
    before = applied(answer.messages, answer.earlier)
    newest = before[len(before) - keep.messages :] if keep.messages else ()
    said = [index for index, each in enumerate(body) if each.role == "assistant"]
    users = {index for index, each in enumerate(body) if each.role == "user" and not each.answered_call_ids}
    moves = (
        proxy.policy.frame.request_introduction is not None
        and find_latest_user_message(body) == len(body) - 1
    )

    assert not {body[index].name for index in taken} & {each.name for each in newest if each.name}
    assert not keep.iterations or not taken & set(range(min(said[-keep.iterations :]), len(body)))
    assert not keep.keeps_task or find_task_index(body) not in taken
    assert proxy.policy.removal_scope != "runs" or not taken & users
    assert moves or not taken & set(range(*list(iter_units(body))[-1]))


def spans_are_sorted_and_disjoint_and_stand_on_the_edges_of_units(_: Proxy, answer: Answer) -> None:
    checkpoint = answer.checkpoint
    if checkpoint is None:
        return
    edges = {edge for unit in iter_units(answer.body) for edge in unit}
    flat = [edge for span in checkpoint.spans for edge in span]
    removing = [span for span in checkpoint.spans if span.start not in checkpoint.edited]

    assert flat == sorted(flat)
    assert all(0 <= span.start < span.stop <= checkpoint.length for span in checkpoint.spans)
    assert edges.issuperset(edge for span in removing for edge in span)
    assert not checkpoint.edited & checkpoint.removed_indices


def a_round_takes_something_new_speaks_of_no_less_and_numbers_itself(proxy: Proxy, answer: Answer) -> None:
    made, earlier, checkpoint = answer.made, answer.earlier, answer.checkpoint
    if made is None or checkpoint is None:
        return
    gone = earlier.removed_indices if earlier else frozenset()
    groups = [index for group in made.groups for index in group]

    assert checkpoint.length >= (earlier.length if earlier else 0)
    assert checkpoint.removed_indices >= gone
    assert groups == sorted(set(groups))
    assert (checkpoint.removed_indices - gone <= set(groups)) or proxy.policy.summary is None
    assert checkpoint.removed_indices > gone or checkpoint.edited > (
        earlier.edited if earlier else frozenset()
    )
    assert made.round == (earlier.round if earlier else 0) + (1 if made.removed_indices else 0)
    assert find_longest_applicable_checkpoint(proxy.stored, answer.body) == checkpoint


def what_an_earlier_round_wrote_stays_byte_for_byte_where_it_is_frozen(proxy: Proxy, answer: Answer) -> None:
    made, earlier, checkpoint = answer.made, answer.earlier, answer.checkpoint
    if made is None or earlier is None or checkpoint is None:
        return
    outside = earlier.edited - checkpoint.removed_indices
    written = [
        each.raw
        for span, put in earlier.span_replacements
        if span.start not in earlier.edited
        for each in put
    ]
    frozen = {
        "leave": written,
        "freeze": raws(list_chain_records(earlier))[: made.frozen_record_count],
        "integrate": [],
    }
    now = raws(answer.effective)

    assert [each for each in now if each in set(written)] == (
        written if not made.removed_indices else frozen[proxy.policy.earlier_rounds]
    )
    assert checkpoint.edited >= outside
    assert all(
        checkpoint.edited_messages[index].raw == earlier.edited_messages[index].raw for index in outside
    )
    assert (
        list_chain_records(checkpoint)[: made.frozen_record_count]
        == list_chain_records(earlier)[: made.frozen_record_count]
    )


def the_same_request_again_gets_the_same_bytes_and_no_second_round(proxy: Proxy, answer: Answer) -> None:
    if answer.made is None or answer.checkpoint is None:
        return
    same = find_longest_applicable_checkpoint(proxy.stored, answer.body)
    again = proxy.planned(answer.messages, same)
    room = proxy.room(answer.effective)
    fits = (
        sum(list_forwarded_sizes(answer.body, same)) <= room.trigger_tokens
    )  # a tail of tokens says nothing where all fits

    assert raws(applied(answer.messages, same)) == raws(answer.effective)
    assert (
        again is None
        or not answer.made.removed_indices
        or (
            proxy.policy.removal_scope == "runs"
            and (proxy.policy.one_run or room.request_tokens < room.trigger_tokens)
        )
        or (proxy.policy.name == "anchored" and fits)
    )


def what_stands_before_the_tail_is_frozen_while_the_list_grows(proxy: Proxy, answer: Answer) -> None:
    new = conversation(proxy.more, 90_000)
    grown = [*answer.messages, *new]
    after = applied(grown, answer.checkpoint)

    assert raws(after[: len(answer.effective)]) == raws(answer.effective)
    assert raws(after[len(answer.effective) :]) == raws(new)
    goes_on = any(
        each.answered_call_ids for each in body_of(new)[:1]
    )  # a late result of what was the last unit
    assert answer.checkpoint is None or goes_on or can_apply_checkpoint(answer.checkpoint, body_of(grown))


def a_stored_checkpoint_is_the_same(_: Proxy, answer: Answer) -> None:
    if answer.checkpoint is None:
        return
    stored = from_fields(to_fields(answer.checkpoint))

    assert stored is not None
    assert raws(applied(answer.messages, stored)) == raws(answer.effective)
    assert to_fields(stored) == to_fields(answer.checkpoint)
    assert (stored.removed_indices, stored.edited, stored.rounds) == (
        answer.checkpoint.removed_indices,
        answer.checkpoint.edited,
        answer.checkpoint.rounds,
    )


def a_checkpoint_stands_for_no_list_with_what_it_speaks_of_changed(proxy: Proxy, answer: Answer) -> None:
    checkpoint, body = answer.checkpoint, answer.body
    if checkpoint is None:
        return
    at = proxy.at * checkpoint.length // 256
    changed = digested(replace(body[at], text=body[at].text + "!" * 300))  # no result is so long

    assert can_apply_checkpoint(checkpoint, body)
    assert not can_apply_checkpoint(checkpoint, [*body[:at], changed, *body[at + 1 :]])
    assert not can_apply_checkpoint(checkpoint, [*body[:at], *body[at + 1 :]])
    assert not can_apply_checkpoint(checkpoint, body[: checkpoint.length - 1])


ALWAYS = (
    calls_are_paired_and_what_may_not_change_has_not,
    the_latest_user_message_is_there_word_for_word,
    what_was_to_stay_is_never_taken,
    spans_are_sorted_and_disjoint_and_stand_on_the_edges_of_units,
    a_round_takes_something_new_speaks_of_no_less_and_numbers_itself,
    what_an_earlier_round_wrote_stays_byte_for_byte_where_it_is_frozen,
    the_same_request_again_gets_the_same_bytes_and_no_second_round,
    what_stands_before_the_tail_is_frozen_while_the_list_grows,
    a_stored_checkpoint_is_the_same,
    a_checkpoint_stands_for_no_list_with_what_it_speaks_of_changed,
)


@every_strategy
@UNHURRIED
@given(data=st.data())
def test_every_answer_is_as_it_should_be(name: str, data: st.DataObject, as_checkpoint: AsCheckpoint) -> None:
    for proxy, answer in answers(data, name, as_checkpoint):
        for holds in ALWAYS:
            holds(proxy, answer)


@every_strategy
@UNHURRIED
@given(data=st.data())
def test_the_same_requests_from_the_start_get_the_same_bytes(
    name: str, data: st.DataObject, as_checkpoint: AsCheckpoint
) -> None:
    policy, trigger, sent = data.draw(policies(name)), data.draw(TRIGGERS), data.draw(requests())
    first, second = (Proxy(policy, trigger, as_checkpoint) for _ in range(2))

    for messages, mask in sent:
        copied = [replace(message) for message in messages]
        assert second.answer(copied, mask=mask) == first.answer(messages, mask=mask)


# Units, repair, alternation and the ladder


@UNHURRIED
@given(conversations())
def test_units_partition_any_list(messages: list[Message]) -> None:
    spans = list(iter_units(messages))

    assert [index for span in spans for index in range(span.start, span.stop)] == list(range(len(messages)))
    assert all(span.start < span.stop for span in spans)
    assert all(not messages[index].calls for span in spans for index in range(span.start + 1, span.stop))


@UNHURRIED
@given(conversations())
def test_repairing_twice_is_repairing_once(messages: list[Message]) -> None:
    once = repair_messages(messages)

    assert paired(once)
    assert privileged(once) == privileged(messages)
    assert repair_messages(once) == once


@UNHURRIED
@given(conversations())
def test_alternation_really_alternates_and_adds_only(messages: list[Message]) -> None:
    repaired = repair_messages(messages)
    made = insert_alternating_fillers(repaired)
    speakers = ["assistant" if each.role == "assistant" else "user" for each in body_of(made)]
    turns = [
        speaker
        for index, speaker in enumerate(speakers)
        if not (index and body_of(made)[index].answered_call_ids and speakers[index - 1] == "user")
    ]

    assert turns == ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]
    assert [each for each in made if each.raw] == [each for each in repaired if each.raw]
    assert insert_alternating_fillers(made) == made


@UNHURRIED
@given(conversations(), st.integers(0, 20_000), st.integers(0, 20_000), st.data())
def test_the_floor_of_the_ladder_keeps_its_promises(
    messages: list[Message], limit: int, most: int, data: st.DataObject
) -> None:
    listed = repair_messages(messages)
    mine = data.draw(st.sets(st.sampled_from(range(len(listed))), max_size=2)) if listed else set()
    ours = frozenset(k for k in mine if listed[k].role == "assistant" and not listed[k].calls)
    squeezed = plan_truncation(listed, limit, ours, most)
    sizes = [
        message.tokens if allowed is KEEP_WHOLE else min(allowed, message.tokens)
        for message, allowed in zip(listed, squeezed.allowances, strict=True)
    ]
    latest = find_latest_user_message([each for k, each in enumerate(listed) if k not in ours])
    theirs = [k for k in range(len(listed)) if k not in ours]
    gone = {k for k, allowed in enumerate(squeezed.allowances) if allowed == LEAVE_OUT}

    assert not squeezed.fits or sum(sizes) <= max(limit, most)
    assert all(squeezed.allowances[k] is KEEP_WHOLE for k, each in enumerate(listed) if each.is_privileged)
    assert latest is None or squeezed.allowances[theirs[latest]] is KEEP_WHOLE
    if gone & ours:  # they go only if the list is too long with them
        plan = plan_truncation(listed, limit, frozenset(), most)
        assert not plan.fits or plan.allowances.count(KEEP_WHOLE) < len(listed)
    assert len(gone) < len(listed) or not listed
    assert paired([each for k, each in enumerate(listed) if k not in gone])
