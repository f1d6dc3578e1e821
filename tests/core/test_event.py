from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.event import (
    COMPACTED,
    PROXY_PART,
    REQUEST_PART,
    STORE_PART,
    SUMMARY_PART,
    Event,
    find_failed_part,
    from_fields,
    to_fields,
)
from compaction_proxy.storage.envelope import pack, unpack

TEXT = st.text(max_size=8)
WHOLE = st.none() | st.integers(-5, 10**9)
EVENTS = st.builds(
    Event,
    kind=st.text(min_size=1, max_size=8),
    at=st.floats(allow_nan=False, allow_infinity=False),
    conversation=TEXT,
    strategy=TEXT,
    round=WHOLE,
    place=TEXT,
    reason=TEXT,
    outcome=TEXT,
    model=TEXT,
    tokens_before=WHOLE,
    tokens_after=WHOLE,
    tokens_real=WHOLE,
    messages=st.integers(0, 100),
    message_ids=st.lists(TEXT, max_size=3).map(tuple),
    seconds=st.none() | st.floats(0, 100),
    summary=TEXT,
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(EVENTS)
def test_an_event_comes_back_from_a_store_as_it_was(event: Event) -> None:
    assert from_fields(unpack(pack(to_fields(event))) or {}) == event


def test_what_is_unknown_is_not_written() -> None:
    told = {"v": 1, "kind": "compacted", "at": 1.0, "conversation": "c_1"}
    assert to_fields(Event(COMPACTED, 1.0, "c_1")) == told


def test_the_event_of_an_older_version_is_read_and_its_messages_are_counted() -> None:
    old = {
        "kind": "compacted",
        "at": 5,
        "conversation": "c_1",
        "strategy": "chained",
        "round": 2,
        "reason": "percent",
        "tokens_before": 900,
        "tokens_after": 300,
        "summary": "done",
        "message_ids": ["m_1", "m_2"],
        "model": "small",
        "seconds": 0.25,
        "of_a_later_version": {"x": 1},
    }
    assert from_fields(old) == Event(
        "compacted",
        5.0,
        "c_1",
        strategy="chained",
        round=2,
        reason="percent",
        model="small",
        tokens_before=900,
        tokens_after=300,
        messages=2,
        message_ids=("m_1", "m_2"),
        seconds=0.25,
        summary="done",
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"kind": "x"}, {"at": 1.0}, {"kind": "", "at": 1.0}, {"kind": "x", "at": "now"},
     {"kind": "x", "at": True}, {"kind": "x", "at": float("inf")}, {"kind": "x", "at": 10**400}],
)  # fmt: skip
def test_fields_that_do_not_say_what_happened_and_when_are_no_event(fields: dict[str, Any]) -> None:
    assert from_fields(fields) is None


@given(st.dictionaries(st.sampled_from(list(Event.__slots__)), ANYTHING))
def test_whatever_stands_in_a_field_an_event_is_read_or_there_is_none(fields: dict[str, Any]) -> None:
    event = from_fields({"kind": "x", "at": 1, **fields})
    assert event is None or from_fields(to_fields(event)) == event


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("store-timeout", STORE_PART),
        ("too-deep", REQUEST_PART),
        ("http-500", SUMMARY_PART),
        ("no-summary-model", SUMMARY_PART),
        ("internal", PROXY_PART),
    ],
)
def test_a_reason_tells_which_part_failed(reason: str, part: str) -> None:
    assert find_failed_part(reason) == part
