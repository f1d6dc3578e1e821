"""Where the tail begins, what the messages take as they are forwarded, and which records are a chain's."""

from collections.abc import Sequence
from dataclasses import replace
from time import process_time

import pytest

from compaction_proxy.core.checkpoint import Checkpoint
from compaction_proxy.core.message import Message, MessageToolCall, Span
from compaction_proxy.core.planner import (
    PlanConstraints,
    find_tail_start,
    list_chain_records,
    list_forwarded_sizes,
    plan_round,
)
from compaction_proxy.core.render import build_effective_list
from compaction_proxy.core.strategies import STRATEGIES, KeepRules, Policy, ScaledLimit

ROOM = PlanConstraints(trigger_tokens=1_000, target_tokens=None, request_tokens=0)
USER = Message("user", "u", tokens=100)
SAID = Message("assistant", "a", tokens=100)
CALLING = Message("assistant", "c", calls=(MessageToolCall("c", "read", "{}"),), tokens=100)
RESULT = Message("tool", "r", answered_call_ids=("c",), tokens=100)
RECORD = Message("user", "[Record]", tokens=9)
SYSTEM = Message("system", "s", tokens=100)


def keeping(keep: KeepRules) -> Policy:
    return replace(STRATEGIES["iterations"], keep=keep)


def made(
    *pieces: tuple[Span, tuple[Message, ...]], rounds: int = 0, edited: frozenset[int] = frozenset()
) -> Checkpoint:
    return Checkpoint(
        strategy="iterations",
        conversation="c_1",
        round=1,
        length=pieces[-1][0].stop,
        exact=bytes(32),
        results=(),
        spans=tuple(span for span, _ in pieces),
        stand_ins=tuple(put for _, put in pieces),
        summary="",
        tokens_before=0,
        tokens_after=0,
        rounds=tuple(range(rounds)),
        edited=edited,
    )


def stop(
    messages: Sequence[Message],
    keep: KeepRules,
    earlier: Checkpoint | None = None,
    room: PlanConstraints = ROOM,
) -> int:
    listed = (
        build_effective_list(messages, earlier.spans, earlier.stand_ins, earlier.edited)
        if earlier
        else tuple(messages)
    )
    body = [message for message in messages if not message.is_privileged]
    return find_tail_start(body, listed, keeping(keep), earlier, room)


@pytest.mark.parametrize(("keep", "expected"), [(0, 9), (1, 9), (2, 8), (5, 5), (9, 1), (10, 0), (99, 0)])
def test_the_newest_messages_stay_and_the_last_unit_always(keep: int, expected: int) -> None:
    assert stop([USER] * 10, KeepRules(messages=keep)) == expected


def test_privileged_messages_in_the_tail_count_and_are_not_the_clients_to_take() -> None:
    assert stop([*[USER] * 8, SYSTEM, USER], KeepRules(messages=4)) == 6


def test_stand_ins_in_the_tail_count_as_messages_but_stand_for_none() -> None:
    earlier = made((Span(0, 6), (RECORD,)))

    assert stop([USER] * 10, KeepRules(messages=5), earlier) == 6
    assert stop([USER] * 10, KeepRules(messages=3), earlier) == 7


def test_a_message_that_stands_between_stand_ins_stays_if_it_is_among_the_newest() -> None:
    earlier = made((Span(0, 3), (RECORD,)), (Span(4, 8), ()))
    messages = [*[SAID] * 3, USER, *[SAID] * 5, USER]

    assert stop(messages, KeepRules(messages=3), earlier) == 3
    assert stop(messages, KeepRules(messages=2), earlier) == 8


def test_a_shortened_message_is_still_the_clients() -> None:
    earlier = made((Span(9, 10), (RESULT,)), edited=frozenset({9}))

    assert stop([*[USER] * 8, CALLING, RESULT], KeepRules(messages=3), earlier) == 7


def test_the_newest_iterations_stay_and_without_so_many_everything_does() -> None:
    messages = [USER, *[CALLING, RESULT] * 4]

    assert [stop(messages, KeepRules(iterations=count)) for count in (1, 2, 4, 5)] == [7, 5, 1, 0]


def test_a_tail_of_tokens_holds_whole_units_and_where_all_fit_it_says_nothing() -> None:
    def tail(tokens: int) -> int:
        return stop([USER, *[CALLING, RESULT] * 4], KeepRules(tail=ScaledLimit(tokens, 1.0)))

    assert [tail(tokens) for tokens in (0, 199, 399, 400, 599, 899, 900)] == [7, 7, 7, 5, 5, 1, 7]


def test_the_message_that_reaches_the_tail_belongs_to_it_where_the_row_says_so() -> None:
    def tail(tokens: int) -> int:
        return stop([USER] * 10, KeepRules(tail=ScaledLimit(tokens, 1.0), includes_reaching_message=True))

    assert [tail(tokens) for tokens in (0, 100, 101, 500, 501, 1_000)] == [9, 9, 8, 5, 4, 0]


def test_messages_take_what_is_forwarded_of_them() -> None:
    short = replace(RESULT, tokens=9)
    earlier = made((Span(0, 2), (RECORD,)), (Span(3, 4), (short,)), edited=frozenset({3}))

    assert list_forwarded_sizes([USER, SAID, CALLING, RESULT, USER], earlier) == [0, 0, 100, 9, 100]
    assert list_forwarded_sizes([USER, SAID], None) == [100, 100]


def test_the_records_of_a_chain_are_the_first_of_their_span() -> None:
    first, second, ledger = (replace(RECORD, text=text) for text in ("1", "2", "ledger"))
    capped = (Span(0, 1), (replace(USER, text="…"),))
    earlier = made(capped, (Span(1, 5), (first, second, ledger)), rounds=2, edited=frozenset({0}))

    assert list_chain_records(earlier) == (first, second)
    assert list_chain_records(made(capped, edited=frozenset({0}))) == ()


@pytest.mark.parametrize("policy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_planning_3_000_messages_takes_no_time_to_speak_of(policy: Policy) -> None:
    messages = [USER, *[CALLING, RESULT] * 1_499, USER]
    earlier = made(*((Span(k, k + 2), (RECORD,)) for k in range(1, 2_001, 2)), rounds=1)
    listed = build_effective_list(messages, earlier.spans, earlier.stand_ins)
    room = PlanConstraints(trigger_tokens=50_000, target_tokens=20_000, request_tokens=100_000)

    started = process_time()
    found = plan_round(messages, listed, policy, earlier, room)
    took_s = process_time() - started

    assert found is not None
    assert took_s < 5  # a hundred times the goal
