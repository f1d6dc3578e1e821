"""`compaction-proxy replay`."""

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compaction_proxy.cli.main import app

TALK = [
    {"role": role, "content": f"{role} {number} " * 300}
    for number in range(8)
    for role in ("user", "assistant")
]
CHOSEN = ["--strategy", "prune", "--strategy", "full", "--trigger-tokens", "2000"]


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"id": name, "messages": TALK}) + "\n" for name in ("one", "two")))
    return path


def replayed(*arguments: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, ["replay", *arguments], env={"COMPACTION_PROXY_CONFIG": ""})
    return ended.exit_code, ended.stdout, ended.stderr


def test_a_table_for_each_conversation_and_one_of_all(talk: Path) -> None:
    code, said, _ = replayed(str(talk), *CHOSEN)
    assert code == 0
    assert re.findall(r"^(.*): \d+ requests", said, re.MULTILINE) == [
        f"{name} (gpt-4o, window 128,000)" for name in ("one", "two", "2 conversations")
    ]
    rows = [line.split()[0] for line in said.splitlines() if line.split()]
    assert [row for row in rows if row in {"(never)", "prune", "full"}] == ["(never)", "prune", "full"] * 3


def test_a_compaction_that_costs_more_than_it_saves_never_pays_back(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(TALK[:6]))  # the last of 3 requests is compacted
    _, said, _ = replayed(str(path), "--strategy", "full", "--trigger-tokens", "2000")
    assert said.rstrip().endswith("never")


def test_json_holds_each_result_and_the_sums(talk: Path) -> None:
    code, said, _ = replayed(str(talk), *CHOSEN, "--json")
    told = json.loads(said)
    named = [(each["conversation"], each["strategy"], len(each["points"])) for each in told["results"]]
    assert code == 0
    assert named == [(name, strategy, 8) for name in ("one", "two") for strategy in ("prune", "full")]
    one, two = (each for each in told["results"] if each["strategy"] == "full")
    [total] = [each for each in told["total"] if each["strategy"] == "full"]
    assert total["forwarded_tokens"] == one["forwarded_tokens"] + two["forwarded_tokens"]
    assert total["rounds"] == 2 * one["rounds"] > 0


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, talk: Path) -> None:
    (tmp_path / "bad").write_text("no")
    assert replayed(str(tmp_path / "bad")) == (1, "", f"{tmp_path}/bad: not JSON\n")
    assert replayed(str(tmp_path / "none")) == (1, "", f"{tmp_path}/none: No such file or directory\n")
    code, _, said = replayed(str(talk), "--strategy", "best")
    assert (code, said.startswith("--strategy: best is not one of anchored,")) == (2, True)


@pytest.mark.timeout(100)
def test_what_may_never_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        assert replayed(str(path)) == (1, "", f"{path}: not a regular file\n")
