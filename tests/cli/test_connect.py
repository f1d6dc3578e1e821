"""`connect`: lines for each client, and configuration files changed with care."""

import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import Result

from compaction_proxy.cli.connect import (
    CLIENTS,
    DEFAULT_WINDOW_TOKENS,
    MAX_FILE_BYTES,
    ClientConfigError,
    edit_codex,
    fill_placeholders,
)

Run = Callable[..., Result]
URL = "http://127.0.0.1:4141/v1"
EDITED = [tool for tool, client in CLIENTS.items() if client.edit]
OLD = {
    "codex": (
        'model = "gpt-5.4" # mine\n\n[profiles.a]\nmodel_provider = "x"\n\n[model_providers.x]\nname = "X"\n'
    ),
    "aider": "# mine\nmodel: gpt-5.4\nset-env: ${NOT_SET_ANYWHERE}\n",
    "continue": "name: Mine\nversion: 1.0.0\nschema: v1\nmodels:\n- name: other # mine\n  provider: x\n",
    "opencode": '{"theme": "dark", "provider": {"x": {"name": "X"}}}',
}


def test_every_client_has_lines_that_name_the_proxy(run: Run) -> None:
    for tool, client in CLIENTS.items():
        done = run("connect", tool, "--url", "http://here:1/v1", "--model", "m-1")
        assert done.exit_code == 0
        assert "http://here:1" in done.stdout
        assert not {"<URL>", "<MODEL>", "<ROOT>"} & set(done.stdout.split())
        assert client.destination in done.stdout
    assert [line.split()[0] for line in run("connect", "--list").stdout.splitlines()[1:]] == list(CLIENTS)


def test_every_client_is_described_as_json_if_asked_for(run: Run) -> None:
    listed = json.loads(run("connect", "--json").stdout)["clients"]
    assert {each["tool"]: each["can_apply"] for each in listed} == {tool: tool in EDITED for tool in CLIENTS}
    told = json.loads(run("connect", "aider", "--json", "--url", "http://here:1").stdout)
    assert told["destination"] == "~/.aider.conf.yml"
    assert yaml.safe_load(told["lines"])["openai-api-base"] == "http://here:1/v1"
    both = run("connect", "aider", "--json", "--apply")
    assert (both.exit_code, both.stderr) == (2, "--apply and --json: choose one of them\n")


def test_the_lines_are_valid_in_their_languages() -> None:
    lines = {tool: fill_placeholders(client.lines, URL, "m") for tool, client in CLIENTS.items()}
    for tool in ("openai-python", "langchain", "llamaindex"):
        compile(lines[tool], tool, "exec")
    assert tomllib.loads(lines["codex"])["model_providers"]["compaction-proxy"]["base_url"] == URL
    assert json.loads(lines["opencode"])["provider"]["compaction-proxy"]["options"]["baseURL"] == URL
    assert yaml.safe_load(lines["continue"])["models"][0]["apiBase"] == URL
    assert yaml.safe_load(lines["librechat"])["endpoints"]["custom"][0]["baseURL"] == URL
    assert yaml.safe_load(lines["litellm"])["model_list"][0]["litellm_params"]["api_base"] == URL


def test_the_url_is_the_configured_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("server: {port: 4242, base_path: /own}\n")
    assert "OPENAI_API_BASE_URL=http://127.0.0.1:4242/v1" in run("connect", "open-webui").stdout.splitlines()


@pytest.mark.parametrize("tool", EDITED)
def test_apply_keeps_what_stands_there_shows_the_change_and_does_it_once(
    tool: str, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / CLIENTS[tool].destination.removeprefix("~/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(OLD[tool])
    file.chmod(0o640)
    done = run("connect", tool, "--apply")
    assert done.exit_code == 0, done.output
    assert any(line.startswith("+") and URL in line for line in done.stdout.splitlines())
    backup = file.with_name(f"{file.name}.before-compaction-proxy")
    assert (backup.read_text(), stat.S_IMODE(file.stat().st_mode)) == (OLD[tool], 0o640)
    made = file.read_text()
    assert "mine" not in OLD[tool] or "mine" in made
    again = run("connect", tool, "--apply")
    assert (again.exit_code, again.stdout) == (0, f"{file}: already up to date\n")
    assert (file.read_text(), sorted(file.parent.glob("*before*"))) == (made, [backup])


@pytest.mark.parametrize("tool", EDITED)
def test_apply_makes_the_file_where_there_is_none(tool: str, run: Run, tmp_path: Path) -> None:
    assert run("connect", tool, "--apply").exit_code == 0
    assert URL in (tmp_path / CLIENTS[tool].destination.removeprefix("~/")).read_text()


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("codex", "model = \n"),
        ("codex", 'model_providers.compaction-proxy = {name = "x"}\n'),
        ("codex", 'model_providers = "x"\n'),
        ("aider", "- a list\n"),
        ("continue", "models: [{name: flow}]\n"),
        ("continue", "models: text\n"),
        ("continue", "models:\n  - name: compaction-proxy\n    apiBase: http://other/v1\n"),
        ("opencode", "{// a comment\n}"),
        ("opencode", "[]"),
        ("opencode", '{"provider": []}'),
    ],
)
def test_a_file_that_is_not_understood_is_left_alone(tool: str, text: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    done = run("connect", tool, "--apply", "--file", str(file))
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"{file}: not changed: ")
    assert (file.read_text(), list(tmp_path.iterdir())) == (text, [file])


def test_line_ends_and_links_stay_as_they_are(run: Run, tmp_path: Path) -> None:
    real, link = tmp_path / "real.yml", tmp_path / "link.yml"
    real.write_bytes(b"model: x\r\nopenai-api-base: http://old/v1\r\n")
    link.symlink_to(real)
    assert run("connect", "aider", "--apply", "--file", str(link)).exit_code == 0
    made = f"model: x\r\nopenai-api-base: {URL}\r\nmax-chat-history-tokens: 128000\r\n"
    assert real.read_bytes() == made.encode()
    assert link.is_symlink()


_PIECES = [
    'model_provider = "x"', "[a]", "[model_providers.compaction-proxy]", 'name = "y"', "", "# c", "[[b]]",
    '[model_providers."compaction-proxy"]', 's = """', "[model_providers]", "k = 1",
    "['model_providers'.q]",
]  # fmt: skip


@given(st.lists(st.sampled_from(_PIECES), max_size=9))
def test_codex_is_pointed_at_us_and_nothing_else_changes_or_the_file_is_refused(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        made = tomllib.loads(edit_codex(text, URL, "m", lambda _: DEFAULT_WINDOW_TOKENS))
    except ClientConfigError:
        return
    before = tomllib.loads(text)
    assert made.pop("model_provider") == "compaction-proxy"
    assert made["model_providers"].pop("compaction-proxy")["base_url"] == URL
    before.pop("model_provider", None)
    before.setdefault("model_providers", {}).pop("compaction-proxy", None)
    assert made.pop("model_context_window") == 128_000
    assert made == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["cudex"],
        ["curl", "--apply"],
        ["curl", "--url", "x"],
        ["curl", "--url", "http://a'b"],
        ["curl", "--url", "http://[b"],
    ],
)
def test_wrong_usage_is_one_line_and_ends_with_2(arguments: list[str], run: Run) -> None:
    done = run("connect", *arguments)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
def test_what_is_no_configuration_file_is_left_alone_at_once(kind: str, run: Run, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    done = run("connect", "aider", "--apply", "--file", str(path), "--url", "http://here:1/v1")
    why = "the file is larger than 1,048,576 bytes" if kind == "large" else "it is not a regular file"
    assert (done.exit_code, done.stderr) == (1, f"{path}: not changed: {why}\n")
