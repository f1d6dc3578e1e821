"""Conversations as files hold them."""

import json
from pathlib import Path

import pytest

from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.replay import recordings as module
from compaction_proxy.replay.recordings import Recording, parse_recording, read_recordings, select_lengths

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
    {"role": "tool", "tool_call_id": "a", "content": "1"},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "And?"},
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def read(path: Path, text: str) -> list[Recording]:
    path.write_text(text, encoding="utf-8")
    return list(read_recordings(path))


def test_a_request_is_made_for_each_answer_and_for_what_has_none_yet() -> None:
    talk = parse_recording({"model": "m", "messages": TALK, "tools": TOOLS, "stream": True}, "talk")
    assert talk.lengths == (2, 4, 6)
    assert json.loads(talk.build_body(4, "n")) == {"model": "n", "messages": TALK[:4], "tools": TOOLS}
    assert json.loads(talk.get_answer(4)) == TALK[4]
    assert talk.get_answer(6) == b""
    assert (select_lengths(talk, 2), select_lengths(talk, 9)) == ((2, 6), (6,))


def test_each_form_of_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    body = {"id": "first", "messages": TALK}
    whole = [
        read(path, json.dumps(TALK, indent=1)),
        read(path, json.dumps(body)),
        read(path, json.dumps(TALK)),
    ]
    lines = read(path, f"{json.dumps(body)}\n\n{json.dumps(TALK)}\n")
    assert [[each.name for each in found] for found in (*whole, lines)] == [
        ["talk.json"], ["first"], ["talk.json"], ["first", "talk.json:3"],
    ]  # fmt: skip
    assert {each.messages for found in (*whole, lines) for each in found} == {whole[0][0].messages}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "talk.json: not JSON"),
        ("{}", "talk.json: neither a request body nor a list of messages"),
        ('{"input": "Hi"}', "talk.json: of the Responses wire; only chat completions can be replayed"),
        (
            '[{"role": "user"}, {"type": "reasoning"}]',
            "talk.json: of the Responses wire; only chat completions can be replayed",
        ),
        (
            '{"system": "S", "messages": [{"role": "user"}]}',
            "talk.json: of the Messages wire; only chat completions can be replayed",
        ),
        (
            '[{"role": "user", "content": [{"type": "tool_result"}]}]',
            "talk.json: of the Messages wire; only chat completions can be replayed",
        ),
        ('[{"role": "system"}]', "talk.json: the request has no message for a model to answer"),
        ('[{"role": "user"}]\n[{"role": "user"}]\nno', "talk.json:3: not JSON"),
    ],
)
def test_what_is_no_conversation_is_refused_in_a_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        read(tmp_path / "talk.json", text)
    assert str(refused.value).removeprefix(f"{tmp_path}/") == problem


def test_files_and_bodies_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(TALK)
    monkeypatch.setattr(module, "MAX_BODY_BYTES", len(text) - 1)
    with pytest.raises(RequestRefusedError, match="a request is larger than"):
        read(tmp_path / "talk.json", text)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    with pytest.raises(RequestRefusedError, match="larger than"):
        read(tmp_path / "talk.json", text)
    with pytest.raises(RequestRefusedError, match="No such file"):
        list(read_recordings(tmp_path / "none"))


def test_what_only_python_takes_for_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text('[{"role": "user", "content": "Hi", "weight": NaN}]')
    with pytest.raises(RequestRefusedError, match="not JSON"):
        list(read_recordings(path))
