"""The judges of bench/quality judge right, on conversations whose truth is known."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.system.black_box import Provider, Received, Reply, chat_reply

ROOT = Path(__file__).resolve().parents[2]
CALL = {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": '{"path": "src/app.py"}'}}


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        names = ("judge", "coverage", "questions", "probes", "tables")
        modules = {name: importlib.import_module(f"quality.{name}") for name in names}
        lists = importlib.import_module("frontier_lists")
        yield SimpleNamespace(**modules, Forwarded=lists.Forwarded)


def say(role: str, content: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": content} | ({"tool_calls": list(calls)} if calls else {})


def call(name: str, result: str, **arguments: str) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    made = {"id": "c1", "type": "function", "function": function}
    return [say("assistant", None, made), {"role": "tool", "tool_call_id": "c1", "content": result}]


class Searcher:
    """Stands in for a player: each search returns the same text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.queries: list[str] = []

    def search(self, row: Any, query: str) -> str:
        self.queries.append(query)
        return self.text


def test_ids_paths_names_and_amounts_are_values(bench: Any) -> None:
    text = (
        "Edit `src/app.py` and setup.cfg: call readFile or set_limit. Trip HAT123, $1,286.50, on 2024-05-15."
    )
    found = ["src/app.py", "setup.cfg", "readFile", "set_limit", "HAT123", "$1,286.50", "2024-05-15"]
    assert bench.judge.find_values(text) == found


def test_words_are_no_values(bench: Any) -> None:
    text = "And/or read/write, e.g. NOT 42 of them. Done! See above: it's well-known..."
    assert bench.judge.find_values(text) == []


@pytest.mark.parametrize("text", ["HAT1234", "XHAT123", "hat123", "HAT 123", ""])
def test_a_text_without_the_whole_value_is_a_miss(bench: Any, text: str) -> None:
    assert not bench.judge.has_value(text, "HAT123")


def test_a_text_with_the_value_is_a_hit(bench: Any) -> None:
    assert bench.judge.has_value('{"id": "HAT123"}', "HAT123")


def find_needs(bench: Any, messages: list[dict[str, Any]], cut: int) -> list[str]:
    return [need.value for need in bench.coverage.Timeline({"messages": messages}).find_needs(cut)]


def test_a_value_that_was_shown_and_is_used_is_needed(bench: Any) -> None:
    messages = [say("user", "Open src/app.py"), say("assistant", None, CALL)]
    assert find_needs(bench, messages, 1) == ["src/app.py"]


def test_a_value_that_is_new_or_shown_again_or_always_there_is_not_needed(bench: Any) -> None:
    use = say("assistant", "I use src/app.py")
    assert find_needs(bench, [say("user", "Go"), use], 1) == []
    shown = say("user", "Open src/app.py")
    assert find_needs(bench, [shown, say("assistant", "Yes"), shown, use], 1) == []
    assert find_needs(bench, [say("system", "Use src/app.py"), shown, use], 2) == []


def test_a_use_after_more_than_five_assistant_messages_is_not_needed(bench: Any) -> None:
    asked = [say("user", "Open src/app.py"), *(say("assistant", "Wait") for _ in range(4))]
    assert find_needs(bench, [*asked, say("assistant", None, CALL)], 1) == ["src/app.py"]
    assert find_needs(bench, [*asked, say("assistant", "Wait"), say("assistant", None, CALL)], 1) == []


def judge_cut(bench: Any, record: str, found: str) -> tuple[dict[str, Any], Searcher]:
    """A cut at which a record replaces the message that showed src/app.py."""
    client = [say("user", "Open src/app.py"), say("assistant", "Yes"), say("user", "Now edit that file")]
    row = {"messages": [*client, say("assistant", None, CALL)]}
    forwarded = bench.Forwarded(client, [say("user", record), client[-1]], "compacted", "c_1", 1)
    texts = {"forwarded": "\n".join(bench.judge.read_contents(forwarded.messages)), "cut off": "that file"}
    searcher = Searcher(found)
    judged = bench.coverage.judge_cut(searcher, row, bench.coverage.Timeline(row), forwarded, texts)
    return judged, searcher


def test_coverage_counts_what_is_forwarded_or_found(bench: Any) -> None:
    held, _ = judge_cut(bench, "[Record] The user opened src/app.py", "nothing")
    assert held["hits"] == {"forwarded": 1, "cut off": 0, "forwarded + search": 1}
    found, _ = judge_cut(bench, "[Record] The user opened a file", "Open src/app.py")
    assert found["hits"] == {"forwarded": 0, "cut off": 0, "forwarded + search": 1}
    missed, _ = judge_cut(bench, "[Record] The user opened a file", "Open src/app.pyc")
    assert missed["hits"] == {"forwarded": 0, "cut off": 0, "forwarded + search": 0}
    assert [held["removed"], held["removed_hits"]["forwarded"]] == [1, 1]
    assert [each["value"] for each in missed["misses"]] == ["src/app.py"]


def test_a_search_does_not_know_the_value(bench: Any) -> None:
    _, searcher = judge_cut(bench, "[Record] The user opened a file", "nothing")
    assert searcher.queries == ["edit path Now that file"]


def test_a_cut_without_a_compaction_is_not_judged(bench: Any) -> None:
    client = [say("user", "Open src/app.py")]
    row = {"messages": [*client, say("assistant", None, CALL)]}
    forwarded = bench.Forwarded(client, client, "none", "c_1")
    timeline = bench.coverage.Timeline(row)
    assert bench.coverage.judge_cut(Searcher(""), row, timeline, forwarded, {}) is None


def test_naive_ways_have_the_newest_text_and_no_more_than_they_may(bench: Any) -> None:
    texts = ["one one", "two two", "three"]
    assert bench.judge.keep_end(texts, 9) == "two\nthree"
    assert bench.judge.keep_newest(texts, [10, 10, 10], 25) == "two two\nthree"
    assert bench.judge.keep_newest(texts, [10, 10, 30], 25) == ""


def test_an_own_summary_stands_before_the_messages_that_were_kept(bench: Any) -> None:
    client = [say("user", "one"), say("assistant", "two"), say("user", "three")]
    forwarded = bench.Forwarded(client, client[1:], "compacted", "c_1", 1)
    row = {"messages": client, "compactions": [{"summary": "S", "first_kept": 2}]}
    texts = bench.coverage.write_contexts(row, forwarded, [1, 1, 1], 100)
    assert texts["own summary"] == "S\nthree"
    assert texts["cut off"] == "two\nthree"


def test_intervals_hold_the_share_and_follow_from_the_seed(bench: Any) -> None:
    groups = {f"row-{number}": [(number % 3, 3.0)] for number in range(20)}
    share = bench.judge.find_share([count for each in groups.values() for count in each])
    low, high = bench.judge.find_interval(groups, 1)
    assert 0 < low < share < high < 1
    assert bench.judge.find_interval(groups, 1) == (low, high)
    assert bench.judge.find_interval({"row": []}, 1) is None
    assert bench.judge.find_interval({"a": [(1, 0), (1, 2)]}, 1)[1] == 1, "a ratio counts what only one has"


def ask(bench: Any, messages: list[dict[str, Any]], **options: Any) -> dict[str, tuple[str, str]]:
    found = bench.questions.make_questions(messages, options.get("asked", ()), 99, "1")
    return {each.text: (each.kind, each.answer) for each in found}


def test_a_value_is_asked_by_its_key_and_a_revised_one_is_the_newest(bench: Any) -> None:
    one = call("get_trip", '{"id": "HAT123", "city": "Austin"}', trip="T1")
    two = call("get_trip", '{"id": "HAT999", "city": "Austin"}', trip="T1")
    found = bench.questions.make_questions([say("user", "Hi"), *one, *two], (), 99, "1")
    asked = {each.kind: each for each in found}
    assert asked["revised"].text == "What is `id` in the latest result of get_trip(trip=T1)?"
    assert (asked["revised"].answer, asked["revised"].stale) == ("HAT999", ("HAT123",))
    assert (asked["value"].answer, asked["value"].sources) == ("Austin", (2, 4))


def test_what_was_done_and_what_is_open_have_one_answer(bench: Any) -> None:
    looked = [*call("get_trip", "{}", trip="TRIP1"), *call("get_trip", "{}", trip="TRIP2")]
    found = ask(bench, [say("user", "Hi"), *looked, *call("cancel_trip", "{}", trip="TRIP1")])
    assert set(found.values()) == {("done", "TRIP1"), ("open", "TRIP2")}


def test_rules_and_paths_are_asked(bench: Any) -> None:
    told = [
        say("user", "Please never touch the limit of 4096 here."),
        say("assistant", "See lib/old/api.py."),
    ]
    assert ask(bench, told) == {
        'The user wrote: "Please never touch the limit of ___ here.". What stood at ___?': ("rule", "4096"),
        "What is the whole path of the file api.py?": ("path", "lib/old/api.py"),
    }


def test_a_path_with_a_namesake_is_not_asked(bench: Any) -> None:
    assert ask(bench, [say("assistant", "See a/x/api.py and b/x/api.py")]) == {}


def test_a_question_needs_a_key_in_its_source_that_nothing_else_tells(bench: Any) -> None:
    given = {"question": "Where?", "answer": "New York", "evidence_msgs": [0]}
    told = say("user", "I moved to New York in May")
    assert ask(bench, [told], asked=[given]) == {"Where?": ("asked", "New York")}
    assert ask(bench, [say("user", "I moved to the city")], asked=[given]) == {}
    assert ask(bench, [told], asked=[given | {"question": "Is it New York?"}]) == {}
    assert ask(bench, [told, say("system", "Users live in New York.")], asked=[given]) == {}
    assert ask(bench, [told], asked=[given | {"evidence_msgs": [1]}]) == {}


@pytest.mark.parametrize(
    ("said", "right"), [("HAT123", 1), ("It is HAT123.", 1), ("hat123", 1), ("HAT1234", 0), ("", 0)]
)
def test_an_answer_is_right_if_it_is_the_value_or_contains_it(bench: Any, said: str, right: int) -> None:
    assert bench.probes.is_right(said, {"answer": "HAT123", "stale": []}) == right


def test_an_answer_that_names_a_replaced_value_is_wrong(bench: Any) -> None:
    assert not bench.probes.is_right("OLD111 or HAT123", {"answer": "HAT123", "stale": ["OLD111"]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A conversation with one question, whose answer the forwarded text no longer holds."""
    question = {
        "kind": "value", "text": "Which id?", "answer": "HAT123", "stale": [], "sources": [0],
        "removed": True, "oracle": "The id is HAT123", "found": "m_1: The id is HAT123",
    }  # fmt: skip
    contexts = {"full history": "The id is HAT123. Bye.", "forwarded": "[Record] An id.", "cut off": "Bye."}
    task = {
        "conversation": "a-1", "cut": 3, "round": 1, "after": 1, "size": 0.5,
        "contexts": contexts, "questions": [question],
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a-1", "messages": [say("user", "-" * 20_000)]}))
    (tmp_path / "tasks").write_text(json.dumps({"conversation": "a-1", "tasks": [task]}))
    return tmp_path


def run_probes(bench: Any, folder: Path, *arguments: str) -> dict[tuple[Any, str], dict[str, Any]]:
    report = folder / "report"
    bench.probes.main([str(folder), "--tasks", str(folder / "tasks"), "--json", str(report), *arguments])
    return {
        (each["after"], each["way"]): each for each in json.loads(report.read_text())["probes"]["figures"]
    }


def test_without_a_reader_only_what_is_present_is_measured(
    bench: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run_probes(bench, folder)
    shares = {way: figure["present"]["share"] for (after, way), figure in figures.items() if after == "all"}
    assert shares == {
        "full history": 1, "forwarded": 0, "forwarded + search": 1, "cut off": 0, "oracle": 1,
    }  # fmt: skip
    assert all(figure["right"]["share"] is None for figure in figures.values())
    assert "No reader answered" in capsys.readouterr().out


def test_answers_of_a_reader_are_kept_and_asked_once(bench: Any, folder: Path) -> None:
    asked: list[str] = []

    def read(request: Received) -> Reply:
        asked.append(request.json()["messages"][0]["content"])
        return chat_reply(request, "It is HAT123." if "HAT123" in asked[-1] else "unknown")

    reader = Provider(read)
    arguments = ("--reader", reader.url, "--answers", str(folder / "answers"))
    try:
        assert run_probes(bench, folder, *arguments, "--minutes", "0")[1, "oracle"]["right"]["of"] == 0
        first = run_probes(bench, folder, *arguments)
        assert len(asked) == len(bench.probes.WAYS)
        assert run_probes(bench, folder, *arguments) == first
    finally:
        reader.close()
    assert len(asked) == len(bench.probes.WAYS), "the second run has all answers"
    assert run_probes(bench, folder, "--answers", str(folder / "answers")) == first
    assert {way: figure["right"]["share"] for (after, way), figure in first.items() if after == 1} == {
        "full history": 1, "forwarded": 0, "forwarded + search": 1, "cut off": 0, "oracle": 1,
    }  # fmt: skip
    assert first[1, "forwarded + search"]["of_full"]["share"] == 1
    assert (first[1, "forwarded"]["write_loss"], first[1, "forwarded"]["read_loss"]) == (1, 0)


def test_a_conversation_is_played_judged_and_kept(bench: Any, tmp_path: Path) -> None:
    lines = (ROOT / "tests/fixtures/frontier_conversations.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text(next(line for line in lines if '"aider-2024-08-11"' in line))
    arguments = [str(tmp_path), "--cuts", "2", "--keep", str(tmp_path / "kept"), "--json"]
    bench.coverage.main([*arguments, str(tmp_path / "one")])
    bench.coverage.main([*arguments, str(tmp_path / "two")])
    measured = json.loads((tmp_path / "one").read_text())["coverage"]
    assert {"coverage": measured} == json.loads((tmp_path / "two").read_text())
    assert len((tmp_path / "kept").read_text().splitlines()) == 1
    ways = {each["way"]: each["needed"] for each in measured["runs"][0]["figures"]}
    assert ways["forwarded"]["of"] > 0
    assert ways["forwarded"]["share"] <= ways["forwarded + search"]["share"]
    assert "Goal: forwarded at least 0.80" in "".join(bench.tables.list_coverage(measured))


def test_without_conversations_it_says_so(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (bench.coverage, bench.probes):
        module.main([str(tmp_path / "absent")])
        assert capsys.readouterr().out == f"skipped: there is no {tmp_path / 'absent'}\n"
