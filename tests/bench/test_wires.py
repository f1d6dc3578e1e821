"""The bench asks the same of every wire, and the upstream answers each in its own shape."""

import json
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.registry import WIRES

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
# How far bodies may be from the size that is meant; a conversation of two turns grows in large steps.
APART = 0.2


@pytest.fixture
def wire_answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import wire_answers

    return wire_answers


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import wires

    return wires


@pytest.mark.parametrize("name", WIRES)
def test_bodies_have_the_size_and_the_messages_that_are_meant(wires: Any, name: str) -> None:
    for kind in wires.KINDS:
        made = list(islice(wires._conversation(name, kind, "s").requests(), kind.grows))
        bodies = [b"".join(each[1:]) for each in made]
        sizes = [len(body) for body in bodies]
        assert mean(sizes) == pytest.approx(kind.body_bytes, rel=APART)
        counts = [len(parse_body(body, WIRES[name]).messages) for body in bodies]
        assert counts == list(range(counts[0], counts[0] + 2 * kind.grows, 2))


@pytest.mark.parametrize(
    ("name", "ending"), [("responses", "response.completed"), ("messages", "message_stop")]
)
def test_streams_have_as_many_events_as_on_chat(wire_answers: Any, name: str, ending: str) -> None:
    events = wire_answers.events(name, 200, 2_500)
    told = [json.loads(each.partition(b"data: ")[2]) for each in events]
    assert (len(told), told[-1]["type"]) == (200, ending)
