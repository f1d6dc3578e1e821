"""Values with the names of what they belong to."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger.facts import ObservedFact, collect_facts, find_named_values
from compaction_proxy.core.message import Message

KINDS = frozenset({"code", "id", "date", "money", "email", "url", "version", "commit", "host", "path"})


def named(text: str) -> list[tuple[str, str]]:
    return [(each.name, each.text) for each in find_named_values(text, KINDS)]


def result(text: object) -> Message:
    return Message("tool", text if isinstance(text, str) else json.dumps(text), answered_call_ids=("x",))


def test_json_is_read_by_its_keys() -> None:
    held = {
        "reservation_id": "OBUT9V",
        "created_at": "2027-05-01T09:08:54",
        "flights": [{"flight_number": "HAT084", "date": "2027-05-28"}],
        "payment_methods": {"gift_card_709123": {"id": "gift_card_709123", "source": "gift"}},
        "address1": "8 Quay",
    }

    assert named(json.dumps(held)) == [
        ("reservation_id", "OBUT9V"),
        ("OBUT9V created_at", "2027-05-01T09:08:54"),
        ("flight_number", "HAT084"),
        ("HAT084 date", "2027-05-28"),
        ("payment_methods.id", "gift_card_709123"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Confirmation number: ABC-12345", [("Confirmation number", "ABC-12345")]),
        ("- **Flight Number:** HAT084", [("Flight Number", "HAT084")]),
        ("the total of $62 is due", [("total", "$62")]),
        ("see customer mia_li_3668.", [("customer", "mia_li_3668")]),
        ("mail ann@shop.example", [("", "ann@shop.example")]),
        ("due: 2027-05-01", [("due", "2027-05-01")]),
        ("at 2027-05-01T09:08:54 it began", []),
        ('"address12": broken', []),
        ("it runs on localhost here", []),
        ("database: localhost", [("database", "localhost")]),
        ("see a.b1234c or x/HAT084", [("", "x/HAT084")]),
        ("--flag22 is on", []),
        ("pi-monorepo@0.0.2", []),
        ("within 24-hour limits", []),
        ("from x import RemovedInDjango40Warning", []),
        ("be 51 07 40 00 be51074000 ret\n" * 20, []),
        ("HEAD is now at a1b2c3d", [("", "a1b2c3d")]),
    ],
)
def test_text_is_read_by_what_stands_before_and_only_whole_tokens_count(
    text: str, expected: list[tuple[str, str]]
) -> None:
    assert named(text) == expected


def test_the_newest_value_of_a_thing_takes_the_place_of_the_older() -> None:
    seen = collect_facts(
        [
            result({"ticket_id": "T-88172", "due": "2027-03-01"}),
            result({"ticket_id": "T-99283", "due": "2027-03-02"}),
            result({"ticket_id": "T-88172", "due": "2027-04-09"}),
        ],
        range(3),
    )

    assert [(each.name, each.text) for each in seen] == [
        ("ticket_id", "T-99283"),
        ("due", "2027-03-02"),
        ("ticket_id", "T-88172"),
        ("due", "2027-04-09"),
    ]


def test_several_values_in_one_message_stay() -> None:
    seen = collect_facts([result({"order_id": "A-1000", "tracking": ["TR-10001", "TR-10002"]})], {0})

    assert [each.text for each in seen] == ["A-1000", "TR-10001", "TR-10002"]


def test_a_value_that_belongs_to_something_else_too_stays() -> None:
    seen = collect_facts(
        [
            result({"ticket_id": "T-88172", "due": "2027-03-01"}),
            result({"ticket_id": "T-99283", "due": "2027-03-01"}),
            result({"ticket_id": "T-88172", "due": "2027-04-09"}),
        ],
        range(3),
    )

    assert "2027-03-01" in [each.text for each in seen]


def test_a_name_once_known_is_kept() -> None:
    seen = collect_facts(
        [result({"order_id": "A-10007"}), Message("assistant", "It went under A-10007.")], {0, 1}
    )

    assert seen == (ObservedFact("code", "A-10007", 1, (), "order_id"),)


@given(
    st.text(max_size=300) | st.builds(json.dumps, st.dictionaries(st.text(max_size=20), st.text(max_size=60)))
)
def test_every_value_stands_in_the_text_and_no_part_of_a_longer_token(text: str) -> None:
    for each in find_named_values(text, KINDS):
        plain = text if each.text in text else json.dumps(json.loads(text), ensure_ascii=False)
        assert each.text in plain or json.dumps(each.text)[1:-1] in plain
