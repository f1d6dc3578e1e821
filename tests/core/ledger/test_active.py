"""When a later statement takes the place of an earlier one, and when both hold."""

# ruff: noqa: RUF001 - many scripts

import pytest

from compaction_proxy.core.ledger.active import (
    ActiveStatements,
    find_unreplaced_part,
    supersedes_statement,
)
from compaction_proxy.core.ledger.statements import read_statements
from compaction_proxy.core.message import Message


def replaced(old: str, new: str, *, next_to: bool = False) -> bool:
    (before,), (after,) = read_statements(old), read_statements(new)
    return supersedes_statement(after, before, is_adjacent=next_to)


def read(*said: str) -> ActiveStatements:
    return ActiveStatements([Message("user", text) for text in said])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("The travel budget is $400.", "The travel budget is $550."),
        ("Our travel budget is capped at $400.", "Travel spending must stay within the limit of $550."),
        ("The nightly backup host is bk1.internal.", "Nightly backups: use host bk2.internal."),
        ("Release is planned for 2027-03-01.", "The planned release is 2027-04-01."),
        ("Only Ana Ruiz may approve refunds.", "Refunds need approval from Ben Okoro."),
        ("Ship the parcel on Monday.", "Ship the parcel on Friday."),
        ("预算是500元。", "预算改为800元。"),
        ("El presupuesto es 500 €.", "Ahora el presupuesto es 700 €."),
        ("Бюджет 500 руб.", "Теперь бюджет 900 руб."),
        ("Use tabs for indentation.", "Actually, use spaces for indentation instead."),
        ("Never use tabs.", "Actually, use tabs."),
        ("Never use tabs.", "never use  tabs."),
        ("Never deploy before 22:00.", "Never deploy before 23:00."),
        ("RULE: use at most 3 retries.", "RULE: use at most 5 retries."),
    ],
)
def test_a_new_value_for_the_same_subject_replaces_the_old(old: str, new: str) -> None:
    assert replaced(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Never use library lodash.", "Never use library moment."),
        ("Set the timeout to 30s for the API client.", "Set the timeout to 60s for the DB client."),
        ("The working branch is feat/login.", "The work is based on commit a1b2c3d."),
        ("The budget is $400.", "Is the budget $550?"),
        ("The budget is $400.", "If the budget were $550, we could go."),
        ("The budget is $400.", "There is also a budget of $550 for food."),
        ("Fix the bug in src/a.py.", "Fix the bug in src/b.py."),
        ("Never restart the server.", "The server is now up."),
        ("Never restart the server.", "Actually, check the server."),
        ("The vault code is AB-123.", "The contact code is CD-456."),
        ("RULE: never grant role admin to user 17.", "RULE: never grant role admin to user 23."),
        ("RULE: never restart db1 before 22:00.", "RULE: never restart web3 before 06:00."),
        ("RULE: never touch branch release-1.", "RULE: never touch branch release-2."),
        ("Never delete files older than 30 days in /a.", "Never delete files older than 90 days in /b."),
        ("Do not send mails to customer 1001.", "Do not send mails to customer 1002."),
        ("RULE: pay at most 100 EUR to vendor A.", "RULE: pay at most 500 EUR to vendor B."),
        ("RULE: always run lint before you commit.", "RULE: always run tests before you push."),
    ],
)
@pytest.mark.parametrize("next_to", [False, True])
def test_what_is_said_of_something_else_replaces_nothing(old: str, new: str, next_to: bool) -> None:  # noqa: FBT001
    assert not replaced(old, new, next_to=next_to)


def test_under_one_label_a_plain_word_is_corrected_by_the_next_message_only() -> None:
    old, new = "STYLE: Answer in the Zolar style.", "STYLE: The answer style is Marn."

    assert replaced(old, new, next_to=True)
    assert not replaced(old, new)
    assert not replaced(old, new.removeprefix("STYLE: "), next_to=True)


def test_a_new_value_for_a_part_leaves_the_other_part() -> None:
    (old,) = read_statements("The codename is LANTERN-7 and the deadline is 2027-01-02.")
    (new,) = read_statements("The deadline is 2027-03-04.")

    left = find_unreplaced_part(new, old)

    assert left is not None
    assert (left.text, left.kind, left.values) == (
        "The codename is LANTERN-7", old.kind, frozenset({("code", "lantern-7")}),
    )  # fmt: skip
    assert find_unreplaced_part(old, new) is None


def test_a_value_that_is_said_again_leaves_all_of_what_was_said_before() -> None:
    (old,) = read_statements("The port is 8080, the host is db.internal.")
    (new,) = read_statements("The port is 8080.")

    assert find_unreplaced_part(new, old) is None


def test_what_takes_something_back_closes_the_newest_request_without_a_label() -> None:
    said = ("Fix the login bug.", "TODO: update the docs.", "The host is db-1.internal.", "Never mind.")

    held = read(*said).list_statements_in_messages(range(len(said)))

    assert [each.statement.text for _, each in held if each.is_closed] == ["Fix the login bug."]


def test_only_a_list_that_begins_with_the_same_texts_carries_on() -> None:
    known = read("Fix the login bug.", "The host is db-1.internal.")

    assert known.is_prefix_of(["Fix the login bug.", "The host is db-1.internal."])
    assert known.is_prefix_of(["Fix the login bug.", "The host is db-1.internal.", "Thanks."])
    assert not known.is_prefix_of(["Fix the logout bug.", "The host is db-1.internal.", "Thanks."])
    assert not known.is_prefix_of(["Fix the login bug."])
