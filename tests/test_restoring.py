"""A stored checkpoint comes back with stand-ins that can be read, repaired and cut like any message."""

from dataclasses import replace

from proxy.core.checkpoint import Checkpoint, to_fields
from proxy.core.message import Message, Span
from proxy.core.repair import repair
from proxy.dialects.chat_message import compose, message
from proxy.restoring import restored

STAND_IN = replace(message(compose(Message(role="assistant", text="## Session Summary"))), tokens=7)
CHECKPOINT = Checkpoint(
    strategy="chained",
    conversation="c_1",
    round=1,
    length=2,
    exact=bytes(32),
    results=(),
    spans=(Span(0, 1), Span(1, 2)),
    stand_ins=(STAND_IN, None),
    summary="what happened",
    tokens_before=100,
    tokens_after=10,
)


def test_a_checkpoint_comes_back_whole_from_its_record() -> None:
    assert restored(to_fields(CHECKPOINT)) == CHECKPOINT


def test_a_stand_in_that_comes_back_is_not_taken_for_an_empty_message() -> None:
    back = restored(to_fields(CHECKPOINT))
    assert back is not None
    assert repair([each for each in back.stand_ins if each]) == (STAND_IN,)


def test_what_is_no_checkpoint_is_absent() -> None:
    broken = to_fields(replace(CHECKPOINT, stand_ins=(replace(STAND_IN, raw=b"["), None)))
    assert [restored(each) for each in (None, {}, {"strategy": "chained"}, broken)] == [None] * 4
