"""`run` names programs that ignore their environment; `connect` tells clients the limits of a model."""

import json
import os
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.black_box import run_command

URL = "http://127.0.0.1:4141"
WINDOW_TOKENS = 40_000


def execute(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command(folder, *arguments, environ={"PATH": f"{folder}:{os.environ['PATH']}"})


def write_program(folder: Path, name: str) -> None:
    """A program of this name that does nothing."""
    program = folder / name
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (["codex", "exec", "hello"], "compaction-proxy connect codex --apply"),
        (["npx", "-y", "@openai/codex@0.169.0", "exec"], f"-c 'openai_base_url=\"{URL}/v1\"'"),
        (["cn", "-p", "hello"], "compaction-proxy connect continue --apply"),
        (["cline", "hello"], f"cline auth --provider openai --baseurl {URL}/v1"),
        (["pi", "-p", "hello"], "~/.pi/agent/models.json"),
    ],
    ids=["codex", "npx-codex", "cn", "cline", "pi"],
)
def test_a_program_that_ignores_its_environment_is_named_with_the_remedy(
    tmp_path: Path, command: list[str], remedy: str
) -> None:
    write_program(tmp_path, command[0])
    done = execute(tmp_path, "run", "--url", URL, "--", *command)
    assert done.returncode == 0
    assert remedy in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_program_that_knows_the_proxy_is_not_warned_of(tmp_path: Path) -> None:
    for name in ("codex", "aider"):
        write_program(tmp_path, name)
    told = execute(tmp_path, "run", "--url", URL, "--", "codex", "-c", f'openai_base_url="{URL}/v1"')
    assert told.stderr == ""
    assert execute(tmp_path, "run", "--url", URL, "--", "aider").stderr == ""
    assert execute(tmp_path, "connect", "codex", "--apply", "--url", URL).returncode == 0
    assert execute(tmp_path, "run", "--url", URL, "--", "codex").stderr == ""


def connect(folder: Path, tool: str, before: str = "") -> tuple[Path, str]:
    """Has a client's file written for a model with a configured window; returns it and what it holds."""
    config, file = folder / "config.json", folder / f"{tool}.settings"
    config.write_text(json.dumps({"models": {"m": {"window": WINDOW_TOKENS}}}))
    if before:
        file.write_text(before)
    asked: list[str | Path] = ["connect", tool, "--apply", "--file", file, "--model", "m", "--config", config]
    done = execute(folder, *asked)
    assert done.returncode == 0, done.stderr
    return file, file.read_text()


def test_clients_are_told_the_window_and_to_leave_room_for_the_prompt(tmp_path: Path) -> None:
    found: dict[str, Any] = {
        "codex": tomllib.loads(connect(tmp_path, "codex")[1]).get("model_context_window"),
        "aider": yaml.safe_load(connect(tmp_path, "aider")[1]).get("max-chat-history-tokens"),
        "continue": yaml.safe_load(connect(tmp_path, "continue")[1])["models"][0].get(
            "defaultCompletionOptions"
        ),
        "opencode": json.loads(connect(tmp_path, "opencode")[1])["provider"]["compaction-proxy"]["models"][
            "m"
        ],
    }
    assert found == {
        "codex": WINDOW_TOKENS,
        "aider": WINDOW_TOKENS,
        "continue": {"contextLength": 1_000_000, "maxTokens": WINDOW_TOKENS // 4},
        "opencode": {"limit": {"context": WINDOW_TOKENS, "output": WINDOW_TOKENS // 4}},
    }


def test_limits_that_stand_in_a_clients_file_stay(tmp_path: Path) -> None:
    _, codex = connect(tmp_path, "codex", "model_context_window = 9000\n")
    assert tomllib.loads(codex)["model_context_window"] == 9000
    _, aider = connect(tmp_path, "aider", "max-chat-history-tokens: 700\n")
    assert yaml.safe_load(aider)["max-chat-history-tokens"] == 700
    models = {"m": {"limit": {"context": 9000, "output": 800}}}
    provider = {"provider": {"compaction-proxy": {"models": models}}}
    _, opencode = connect(tmp_path, "opencode", json.dumps(provider))
    assert json.loads(opencode)["provider"]["compaction-proxy"]["models"] == models
