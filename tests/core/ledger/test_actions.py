"""What calls of tools did, judged by their names, their forms and their results."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger.actions import (
    Action,
    ActionEffect,
    describe_action_groups,
    format_action_items,
    read_action,
)
from compaction_proxy.core.ledger.facts import ERROR_CHARACTERS
from compaction_proxy.core.ledger.statements import reads_as_order
from compaction_proxy.core.message import MessageToolCall


def act(name: str, arguments: object, result: str | None = "ok") -> Action:
    return read_action(
        MessageToolCall("1", name, arguments if isinstance(arguments, str) else json.dumps(arguments)), result
    )


@pytest.mark.parametrize(
    ("name", "arguments", "effect"),
    [
        ("book_reservation", {"flight": "HAT1"}, "write"),
        ("get_order_status", {"order": 1}, "read"),
        ("cancelOrder", {"order": 1}, "write"),
        ("lockDoors", {"unlock": True}, "write"),
        ("frobnicate", {"x": 1}, "unknown"),
        ("open", {"path": "a.py"}, "read"),
        ("str_replace_editor", {"command": "view", "path": "a.py"}, "read"),
        ("str_replace_editor", {"command": "create", "path": "a.py"}, "write"),
        ("http", {"method": "POST", "url": "https://a.example"}, "write"),
        ("http", {"method": "GET", "url": "https://a.example"}, "read"),
        ("run_sql", {"query": "UPDATE users SET name = 'x'"}, "write"),
        ("run_sql", {"query": "SELECT * FROM users"}, "read"),
        ("bash", {"command": "cat a.py | head"}, "read"),
        ("bash", {"command": "cd src && grep -rn foo . | head"}, "read"),
        ("bash", {"command": "cd src && npm run publish"}, "write"),
        ("bash", {"command": "cd src && npm run build"}, "unknown"),
        ("bash", {"command": "cat a.py\npython b.py"}, "unknown"),
        ("bash", {"command": "grep -n 'a | rm > b' c.py"}, "read"),
        ("bash", {"command": "bash -c 'rm -rf build'"}, "unknown"),
        ("bash", {"command": 'ssh host "cd x; rm -rf build"'}, "write"),
        ("bash", {"command": "edit 178:182"}, "write"),
        ("bash", {"command": "sed -i s/a/b/ a.py"}, "write"),
        ("bash", {"command": "git commit -m x"}, "write"),
        ("bash", {"command": "git log --oneline"}, "read"),
        ("bash", {"command": "echo x > a.txt"}, "write"),
        ("bash", {"command": "make 2> /dev/null"}, "unknown"),
        ("bash", {"command": "pytest -q"}, "unknown"),
        ("bash", {"command": "curl -X DELETE https://a.example/1"}, "write"),
        ("shell", {"command": ["rm", "-rf", "build"]}, "write"),
        ("bash", "not json", "unknown"),
    ],
)
def test_a_call_is_judged_by_its_verb_and_by_the_form_of_what_it_sends(
    name: str, arguments: object, effect: ActionEffect
) -> None:
    assert act(name, arguments).effect is effect


@pytest.mark.parametrize(
    ("result", "outcome", "failed"),
    [
        ("Error: not enough seats", "Error: not enough seats", True),
        ("ERROR:\nNo replacement was performed", "ERROR: No replacement was performed", True),
        ('{"error": "no such order"}', "error: no such order", True),
        ('{"error": {"message": "no such order"}}', "error: no such order", True),
        ('{"success": false, "message": "too late"}', "failed: too late", True),
        ('{"status": "failed"}', "status failed", True),
        ('{"status_code": 404}', "status code 404", True),
        ('{"exit_code": 3}', "exit code 3", True),
        ('{"order_id": "A-17", "error": null}', "done, order_id A-17", False),
        ('{"success": true}', "done", False),
        ("Everything went well and was stored.", "done", False),
        ("5.0", "5.0", False),
        ("", "done", False),
        ("Wrong flag!", "Wrong flag!", True),
    ],
)
def test_a_result_tells_how_a_call_ended(result: str, outcome: str, failed: bool) -> None:  # noqa: FBT001 - a row
    found = act("book", {"flight": "HAT1"}, result)

    assert (found.outcome, found.has_failed) == (outcome, failed)


@pytest.mark.parametrize(
    ("result", "outcome", "failed"),
    [
        ("....\n30 passed in 2.1s", "30 passed in 2.1s", False),
        (
            "1 failed, 2 passed in 1s\nFAILED tests/a.py::test_b - KeyError",
            "FAILED tests/a.py::test_b - KeyError",
            True,
        ),
        ("out\nProcess exited with code 2", "exit code 2", True),
        ("Traceback (most recent call last):\n  x\nValueError: bad row", "ValueError: bad row", True),
        ("bash: foo: command not found\nexit code: 127", "exit code 127; command not found", True),
    ],
)
def test_a_command_is_told_with_the_test_that_failed(result: str, outcome: str, failed: bool) -> None:  # noqa: FBT001
    found = act("bash", {"command": "pytest -q tests"}, result)

    assert (found.outcome, found.has_failed) == (outcome, failed)


def test_what_was_only_read_does_not_fail_because_it_speaks_of_errors() -> None:
    code = "def f():\n    raise ValueError('x')\n" + "x = 1\n" * 400

    assert not act("bash", {"command": "cat a.py"}, code).has_failed
    assert not act("read_file", {"path": "a.py"}, f"ValueError: is explained here\n{code}").has_failed


def test_a_call_that_nothing_answered_has_no_result() -> None:
    found = act("book", {"flight": "HAT1"}, None)

    assert (found.outcome, found.has_result, found.has_failed) == ("no result", False, False)


def test_arguments_are_short_and_an_edit_shows_what_it_changes() -> None:
    found = act(
        "edit", {"path": "a.py", "oldText": "a = 1\nb = 2", "newText": "a = 1\nb = 3", "content": "x" * 999}
    )

    assert found.arguments == (("path", "a.py"), ("", "+ b = 3"))
    assert act("edit", {"path": "a", "old_str": "x = 1\ny = 2", "new_str": "x = 1"}).arguments[-1] == (
        "",
        "- y = 2",
    )


def test_an_edit_names_what_is_new_in_it() -> None:
    old, new = (
        "def load(path):\n    return 1",
        "def load(path, user_id):\n    return read_file(path)\n\ndef save():",
    )

    assert act("edit", {"path": "a.py", "old_str": old, "new_str": new}).arguments == (
        ("path", "a.py"),
        ("", "+ def load(path, user_id):"),
        ("names", "save read_file"),
    )
    assert act("write", {"path": "a.py", "content": new}).arguments == (
        ("path", "a.py"),
        ("names", "load save user_id read_file"),
    )
    assert act("send", {"to": "bob", "content": new}).arguments == (("to", "bob"),)


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_patch_shows_its_files_and_what_it_changes_in_them(form: str) -> None:
    patch = "*** Begin Patch\n*** Update File: a.py\n-x = 1\n+x = 2\n*** Delete File: b.py\n*** End Patch"

    assert act("apply_patch", {"input": patch} if form == "json" else patch).arguments == (
        ("path", "a.py"),
        ("", "+ x = 2"),
        ("path", "b.py"),
    )


def test_values_that_repeat_inside_an_argument_stand_once() -> None:
    flights = [{"number": "HAT1", "date": "2027-05-01"}, {"number": "HAT2", "date": "2027-05-01"}]

    assert act("book", {"flights": flights, "bags": 1, "free": 1}).arguments == (
        ("flights", "HAT1"), ("flights", "2027-05-01"), ("flights", "HAT2"), ("bags", "1"), ("free", "1"),
    )  # fmt: skip


def lines(*actions: Action) -> list[str]:
    return [each.text for each in describe_action_groups(list(enumerate(actions)))]


def test_calls_with_one_thing_share_a_line_that_ends_with_the_newest() -> None:
    tries = [
        act("pay", {"order": "A-1", "card": "c1"}, "Error: balance is not enough"),
        act("pay", {"order": "A-1", "card": "c2"}, "paid"),
    ]

    assert lines(*tries) == ["pay order A-1: card c1 → Error: balance is not enough; card c2 → paid"]


def test_an_end_that_calls_share_stands_once() -> None:
    edits = [
        act("edit", {"path": "a.py", "old": "x", "new": f"line {k}"}, "Replaced it well.") for k in range(3)
    ]

    assert lines(*edits) == ["edit a.py: + line 0; + line 1; + line 2 → done"]


def test_a_search_that_finds_nothing_has_not_failed() -> None:
    assert not act("bash", {"command": "grep -rn foo ."}, "Command exited with code 1").has_failed
    assert act("bash", {"command": "grep -rn foo ."}, "Command exited with code 2").has_failed


def test_what_succeeded_comes_before_what_did_not_and_newer_before_older() -> None:
    found = lines(
        act("pay", {"order": "A-1"}),
        act("pay", {"order": "A-2"}),
        act("pay", {"order": "A-3"}, "Error: no money"),
    )

    assert found == ["pay order A-2 → ok", "pay order A-1 → ok", "pay order A-3 → Error: no money"]


def test_a_line_that_would_be_too_long_keeps_the_success() -> None:
    tries = [act("pay", {"order": "A-1", "card": "right"}, "paid")]
    tries += [
        act("pay", {"order": "A-1", "card": f"card-{k}"}, f"Error: no money on card {k}") for k in range(40)
    ]
    [line] = describe_action_groups(list(enumerate(tries)), 200)

    assert "card right → paid" in line.text
    assert len(line.text) <= 200
    assert line.short_text == "pay A-1 → Error: no money on card 39"


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=40))
def test_whatever_is_sent_and_answered_is_told_on_one_short_line_without_orders(
    sent: str, result: str, name: str
) -> None:
    for arguments in (sent, json.dumps({"path": sent, "x": [sent]}), json.dumps({"command": sent})):
        found = read_action(MessageToolCall("1", name, arguments), result)
        assert found == read_action(MessageToolCall("1", name, arguments), result)
        told = [found.outcome, *(value for _, value in found.arguments)]
        assert all("\n" not in each and len(each) <= ERROR_CHARACTERS for each in told)
        assert not any(" " in each and reads_as_order(each) for each in told)


def test_listed_calls_leave_room_for_the_short_forms_of_those_behind_them() -> None:
    def pay(bill: str, note: str) -> Action:
        return Action("pay", (("bill", bill), ("note", note)), "done", "write", has_failed=False)

    actions = list(enumerate([pay("B1", "x" * 50), pay("B2", "y" * 50), pay("B3", "z" * 50)]))

    assert list(format_action_items(actions, 1_000)) == [
        f"- pay bill {bill}, note {letter * 50} → done"
        for bill, letter in (("B3", "z"), ("B2", "y"), ("B1", "x"))
    ]
    assert list(format_action_items(actions, 120)) == [
        f"- pay bill B3, note {'z' * 50} → done",
        "- pay B2 → done",
        "- pay B1 → done",
    ]


def test_a_listed_call_without_room_for_all_still_shows_its_ids() -> None:
    given = {"id": "JG7FMM", "flights": ["HAT028", "HAT277"], "payment": "card_39", "reason": "plan"}
    actions = [(0, act("update_reservation", {**given, "note": "as the traveller has wished for it"}, "{}"))]

    assert list(format_action_items(actions, 75)) == [
        "- update_reservation JG7FMM HAT028 HAT277 card_39 → done"
    ]
    assert list(format_action_items(actions, 50)) == ["- update_reservation JG7FMM → done"]
