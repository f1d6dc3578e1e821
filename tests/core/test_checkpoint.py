"""When a checkpoint may stand for what a client sends, and how it is written down."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.checkpoint import (
    EXTRACT_WRITER,
    HEAD_CHARACTERS,
    MAX_NOTICE_CHARACTERS,
    Checkpoint,
    build_checkpoint_id,
    can_apply_checkpoint,
    compute_exact_digest,
    find_longest_applicable_checkpoint,
    from_fields,
    get_prefix_digest,
    list_covered_results,
    list_participant_names,
    to_fields,
)
from compaction_proxy.core.digest import compute_message_digest
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall, Span

# The machine may be busy.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LONG = "".join(f"line {number}\n" for number in range(100))


def digested(message: Message) -> Message:
    return replace(message, digest=compute_message_digest(message))


def text(message: Message, text: str) -> Message:
    return digested(replace(message, text=text))


TASK = digested(Message("user", "Build it"))
CALLING = digested(Message("assistant", "Reading.", calls=(MessageToolCall("a", "read", '{"p": "x"}'),)))
RESULT = digested(Message("tool", LONG, answered_call_ids=("a",)))
SAID = digested(Message("assistant", "It says 42."))
NEXT = digested(Message("user", "Go on"))
LIST = [TASK, CALLING, RESULT, SAID, NEXT]
STAND_IN = Message("assistant", "summary", raw=b'{"role":"assistant"}', tokens=5)


def covering(messages: list[Message], *spans: Span, round_number: int = 1) -> Checkpoint:
    """A checkpoint of these spans, made of this list."""
    length = spans[-1].stop
    return Checkpoint(
        strategy="chained",
        conversation="c_1",
        round=round_number,
        length=length,
        exact=compute_exact_digest(messages[:length]),
        results=list_covered_results(messages, spans),
        spans=spans,
        stand_ins=((STAND_IN,), *(() for _ in spans[1:])),
        summary="what happened",
        tokens_before=100,
        tokens_after=10,
        listed=len(messages),
    )


COVERING = covering(LIST, Span(0, 4))


def with_result(message: Message) -> list[Message]:
    return [TASK, CALLING, message, SAID, NEXT]


def test_a_checkpoint_stands_for_the_list_it_was_made_of_and_for_what_it_grows_to() -> None:
    assert can_apply_checkpoint(COVERING, LIST)
    assert can_apply_checkpoint(COVERING, [*LIST, SAID, NEXT])


@pytest.mark.parametrize(
    "cleared",
    [
        "",
        "[cleared]",
        "x" * MAX_NOTICE_CHARACTERS,
        LONG[:400],
        LONG[:HEAD_CHARACTERS] + "\n[… cut]" + "y" * 300,
    ],
    ids=["emptied", "notice", "longest-notice", "head", "head-and-mark"],
)
def test_a_covered_tool_result_may_be_cleared_or_shortened(cleared: str) -> None:
    assert can_apply_checkpoint(COVERING, with_result(text(RESULT, cleared)))


def test_a_covered_tool_result_may_lose_its_images_with_its_text() -> None:
    image = digested(replace(RESULT, parts=(ContentPart("image_url", bytes(32), 0),)))

    assert can_apply_checkpoint(
        covering(with_result(image), Span(0, 4)), with_result(text(RESULT, "[cleared]"))
    )


@pytest.mark.parametrize(
    "other",
    [
        text(RESULT, LONG + "more"),
        text(RESULT, LONG[1:]),
        text(RESULT, "!" + LONG[1:-1]),
        digested(replace(RESULT, text="[cleared]", answered_call_ids=("b",))),
        digested(replace(RESULT, text="[cleared]", role="function")),
        digested(Message("user", "short")),
        digested(Message("assistant", "short")),
    ],
    ids=["grown", "without-head", "rewritten", "other-call", "other-role", "user", "assistant"],
)
def test_a_covered_tool_result_may_not_become_anything_else(other: Message) -> None:
    assert not can_apply_checkpoint(COVERING, with_result(other))


def test_a_tool_result_that_is_not_covered_must_stay_as_it_is() -> None:
    kept = covering([NEXT, *LIST], Span(0, 2))
    behind = replace(kept, length=4, exact=compute_exact_digest([NEXT, TASK, CALLING, RESULT]))

    assert can_apply_checkpoint(behind, [NEXT, *LIST])
    assert not can_apply_checkpoint(behind, [NEXT, *with_result(text(RESULT, ""))])


EDITS: dict[str, Callable[[list[Message]], list[Message]]] = {
    "an edited task": lambda listed: [text(listed[0], "Build another"), *listed[1:]],
    "an edited answer": lambda listed: [*listed[:3], text(SAID, "It says 43."), *listed[4:]],
    "a shortened answer": lambda listed: [*listed[:3], text(SAID, ""), *listed[4:]],
    "a regenerated answer": lambda listed: [*listed[:3], text(SAID, "Fourty-two."), NEXT],
    "other arguments": lambda listed: [
        TASK,
        digested(replace(CALLING, calls=(MessageToolCall("a", "read", "{}"),))),
        *listed[2:],
    ],
    "another order": lambda listed: [listed[0], listed[3], *listed[1:3], *listed[4:]],
    "a message left out": lambda listed: [listed[0], *listed[3:]],
    "a message put in": lambda listed: [listed[0], NEXT, *listed[1:]],
    "a fork": lambda listed: [*listed[:1], SAID, NEXT],
    "a truncation": lambda listed: listed[:3],
    "a truncation of all": lambda _: [],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_checkpoint_does_not_stand_for(edit: Callable[[list[Message]], list[Message]]) -> None:
    assert not can_apply_checkpoint(COVERING, edit(LIST))


def test_the_latest_user_message_is_never_hidden() -> None:
    assert not can_apply_checkpoint(COVERING, LIST[:4])
    assert not can_apply_checkpoint(COVERING, [*LIST[:4], SAID])
    assert can_apply_checkpoint(covering(LIST, Span(1, 4)), LIST[:4])


def test_a_user_message_that_is_carried_may_be_the_latest() -> None:
    carrying = replace(COVERING, carried=0)

    assert can_apply_checkpoint(carrying, LIST[:4])
    assert can_apply_checkpoint(carrying, LIST)
    assert not can_apply_checkpoint(replace(COVERING, carried=1), LIST[:4])


def test_a_shortened_message_may_not_be_the_latest_of_the_user() -> None:
    shortened = replace(covering(LIST, Span(0, 1)), edited=frozenset({0}))

    assert not can_apply_checkpoint(shortened, LIST[:4])
    assert can_apply_checkpoint(shortened, LIST)


def test_a_further_result_of_a_call_that_is_gone_is_a_miss() -> None:
    parallel = digested(
        Message("assistant", calls=(MessageToolCall("a", "read", ""), MessageToolCall("b", "read", "")))
    )
    late = digested(Message("tool", "late", answered_call_ids=("b",)))
    covering_the_call = covering([TASK, parallel, RESULT, NEXT], Span(1, 3))

    assert can_apply_checkpoint(covering_the_call, [TASK, parallel, RESULT, NEXT])
    assert not can_apply_checkpoint(covering_the_call, [TASK, parallel, RESULT, late, NEXT])
    assert can_apply_checkpoint(
        replace(covering_the_call, spans=(Span(2, 3),), edited=frozenset({2})), [TASK, parallel, RESULT, late]
    )


def test_places_differ_by_prefix_content_spans_and_variant() -> None:
    spans = [Span(0, 1)]
    places = [
        build_checkpoint_id(bytes(32), bytes(32), spans),
        build_checkpoint_id(bytes([1]) * 32, bytes(32), spans),
        build_checkpoint_id(bytes(32), bytes([1]) * 32, spans),
        build_checkpoint_id(bytes(32), bytes(32), [Span(0, 11)]),
        build_checkpoint_id(bytes(32), bytes(32), [Span(0, 1), Span(1, 2)]),
        build_checkpoint_id(bytes(32), bytes(32), spans, "1"),
        build_checkpoint_id(bytes(32), bytes(32), spans, ",1-2"),
        build_checkpoint_id(bytes(32), bytes(32), spans, "extract"),
    ]

    assert len(set(places)) == len(places)
    assert {len(each) for each in places} == {64}
    assert get_prefix_digest(places[1]) == bytes([1]) * 32


def test_of_equally_deep_checkpoints_the_newest_that_a_model_wrote_is_taken() -> None:
    first = replace(COVERING, writer=EXTRACT_WRITER)
    written, later = replace(COVERING, writer="small"), replace(COVERING, round=2, writer=EXTRACT_WRITER)

    assert find_longest_applicable_checkpoint([first, written], LIST) == written
    assert find_longest_applicable_checkpoint([written, later, first], LIST) == later


def test_a_checkpoint_of_nothing_stands_for_nothing() -> None:
    assert not can_apply_checkpoint(replace(COVERING, length=0, spans=(), stand_ins=()), LIST)


def test_the_deepest_checkpoint_that_stands_is_taken() -> None:
    shallow, deep = covering(LIST, Span(0, 1)), COVERING
    foreign = covering([SAID, *LIST], Span(0, 5))

    assert find_longest_applicable_checkpoint([shallow, None, foreign, deep], LIST) == deep
    assert find_longest_applicable_checkpoint([shallow, deep], [TASK, SAID, NEXT]) == shallow
    assert find_longest_applicable_checkpoint([None, foreign], LIST) is None


def test_a_checkpoint_comes_back_from_its_fields() -> None:
    several = covering(LIST, Span(0, 1), Span(1, 3), round_number=7)

    assert from_fields(to_fields(several)) == several


def test_a_checkpoint_of_a_chain_with_shortened_messages_comes_back_from_its_fields() -> None:
    shortened = replace(RESULT, text="[cut]", raw=b"[cut]", tokens=3, digest=b"")
    ledger = Message("user", "ledger", raw=b"ledger", tokens=4)
    several = replace(
        covering(LIST, Span(0, 2), Span(2, 3)),
        stand_ins=((STAND_IN, ledger), (shortened,)),
        carried=0,
        rounds=(2,),
        writer="small",
        edited=frozenset({2}),
    )

    assert from_fields(to_fields(several)) == several
    assert (several.removed_indices, several.edited_messages) == (frozenset({0, 1}), {2: shortened})


BASE = to_fields(COVERING)
NEWER = ("carried", "rounds", "writer", "edited")


def test_what_version_0_1_stored_is_read() -> None:
    old = to_fields(covering(LIST, Span(0, 1), Span(1, 3)))
    stored = {key: value for key, value in old.items() if key not in NEWER}
    stored["stand_ins"] = [["assistant", "summary", "eyJyb2xlIjoiYXNzaXN0YW50In0=", 5], None]

    assert from_fields(stored) == covering(LIST, Span(0, 1), Span(1, 3))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**BASE, "round": float("inf")},
        {**BASE, "exact": "zz"},
        {**BASE, "tokens": [1]},
        {**BASE, "stand_ins": []},
        {**BASE, "stand_ins": [0]},
        {**BASE, "stand_ins": [""]},
        {**BASE, "stand_ins": ["abcd"]},
        {**BASE, "stand_ins": [[0]]},
        {**BASE, "carried": True},
        {**BASE, "carried": "1"},
        {**BASE, "edited": [0]},
        {**BASE, "edited": [3]},
        {**BASE, "rounds": 1},
        {**BASE, "stand_ins": [["assistant", "text", "no base64!", 1]]},
        {**BASE, "spans": [[0, 5]]},
        {**BASE, "spans": [[2, 1]]},
        {**BASE, "spans": [[-1, 2]]},
        {**BASE, "results": [[1, "00", "00", 3]]},
        {key: value for key, value in BASE.items() if key != "listed"},
    ],
)
def test_fields_that_no_checkpoint_has_are_none(fields: dict[str, object]) -> None:
    assert from_fields(fields) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@UNHURRIED
@given(st.dictionaries(st.sampled_from(sorted(BASE)), JSON), st.booleans())
def test_fields_are_read_whatever_they_hold(
    fields: dict[str, object],
    complete: bool,  # noqa: FBT001 - filled by hypothesis
) -> None:
    checkpoint = from_fields({**BASE, **fields} if complete else fields)

    assert checkpoint is None or from_fields(to_fields(checkpoint)) == checkpoint


def test_a_shorter_result_of_a_conversation_with_another_id_is_another_result() -> None:
    made = covering(LIST, Span(0, 4))
    cleared = [TASK, CALLING, text(RESULT, "gone"), SAID, NEXT]
    assert can_apply_checkpoint(made, cleared)
    assert can_apply_checkpoint(made, cleared, "c_1")
    assert not can_apply_checkpoint(made, cleared, "c_2")
    assert can_apply_checkpoint(made, LIST, "c_2")


def test_what_the_client_has_shortened_itself_is_not_put_back() -> None:
    capped = text(RESULT, "line 0 … line 99")
    made = replace(covering(LIST, Span(2, 3)), stand_ins=((capped,),), edited=frozenset({2}))
    assert find_longest_applicable_checkpoint([made], [TASK, CALLING, RESULT, SAID, NEXT]) == made
    found = find_longest_applicable_checkpoint([made], [TASK, CALLING, text(RESULT, "gone"), SAID, NEXT])
    assert found == replace(made, spans=(), stand_ins=(), edited=frozenset())


def test_a_name_that_only_one_side_has_makes_no_difference_and_two_names_do() -> None:
    plain = [digested(replace(each, name="")) for each in (TASK, CALLING, RESULT, NEXT)]
    named = [digested(replace(plain[0], name="ann")), *plain[1:]]
    other = [digested(replace(plain[0], name="bob")), *plain[1:]]
    spans = (Span(1, 3),)
    for body, standing in ((plain, (plain, named, other)), (named, (plain, named))):
        made = Checkpoint(
            strategy="split",
            conversation="c_1",
            round=1,
            length=3,
            exact=compute_exact_digest(body[:3]),
            results=list_covered_results(body, spans),
            spans=spans,
            stand_ins=((),),
            summary="",
            tokens_before=0,
            tokens_after=0,
            names=list_participant_names(body[:3]),
        )
        assert from_fields(to_fields(made)) == made
        for sent in (plain, named, other):
            assert can_apply_checkpoint(made, sent) is (sent in standing)
            assert not can_apply_checkpoint(replace(made, names=None), sent) or sent == body
