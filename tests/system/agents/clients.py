"""The clients: how each is configured, started and resumed, and how its tools are called."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.system.agents.install import VERSIONS, install_program
from tests.system.agents.provider import Tools
from tests.system.agents.wires import Call

HERE = Path(__file__).parent
SESSION_LIMIT_S = 900.0  # of one task; only catches a hang
MODEL = "gpt-5.4-mini"
CLAUDE = "claude-sonnet-4-5"
KEY = "sk-agents"


@dataclass(frozen=True)
class Place:
    """Where a session runs.

    Attributes:
        url: What the client takes for its provider, without /v1.
        home: The client's home folder, empty at first.
        workspace: The project that it works on.
        commands: The folder with the client's commands.
    """

    url: str
    home: Path
    workspace: Path
    commands: Path

    def write_home(self, name: str, content: Any) -> None:
        """Write a file of the home folder: a text, or JSON."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))


def _configure_nothing(place: Place) -> None:
    pass


@dataclass(frozen=True)
class Client:
    """A client on one wire.

    Attributes:
        name: Its name in `versions.json`.
        wire: What it speaks.
        tools: How its tools are called.
        command: Its command line for a task; told whether the session is resumed.
        configure: Writes its configuration.
        environ: Its environment variables.
        instructions_file: The project's file of instructions that it reads.
        error_lines: What lines of its output begin with that tell of an error.
        is_step: Tells a step of the session from a side call; None: what has tools is one.
        typed: What is typed into it for a task.
    """

    name: str
    wire: str
    tools: Tools
    command: Callable[[Place, str, bool], Sequence[str]]
    configure: Callable[[Place], None] = _configure_nothing
    environ: Callable[[Place], Mapping[str, str]] = lambda _: {}
    instructions_file: str = "AGENTS.md"
    error_lines: tuple[str, ...] = ("error", "api error", "traceback", "unhandled")
    is_step: Callable[[Any], bool] | None = None
    plan: Callable[[Tools, int], Any] | None = None
    typed: Callable[[str], str] = lambda _: ""

    @property
    def id(self) -> str:
        return f"{self.name}-{self.wire}"

    @property
    def version(self) -> str:
        return str(next(iter(VERSIONS[self.name]["packages"].values())))


@dataclass(frozen=True)
class Ended:
    """How a client's process has ended."""

    exit_code: int
    output: str


def install_client(client: Client) -> Path:
    """Returns the folder with the client's commands; skips the test where it cannot be installed."""
    if VERSIONS[client.name]["registry"] == "npm":
        install_program("node")
    return install_program(client.name)


def run_client(client: Client, place: Place, task: str, *, is_resumed: bool) -> Ended:
    """Run a client for one task, to its end."""
    node = install_program("node").parent / "node" / "bin"
    environ = {
        "HOME": str(place.home),
        "PATH": f"{node}:{place.commands}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "CI": "true",
        "DO_NOT_TRACK": "1",
        # Nothing listens there, so no other host can be reached.
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1,localhost",
        **client.environ(place),
    }
    done = subprocess.run(
        client.command(place, task, is_resumed),
        cwd=place.workspace,
        env=environ,
        input=client.typed(task),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SESSION_LIMIT_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout)


def _configure_codex(place: Place) -> None:
    place.write_home(
        ".codex/config.toml",
        f"""
model = "{MODEL}"
model_provider = "compaction-proxy"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.compaction-proxy]
name = "compaction-proxy"
base_url = "{place.url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
""",
    )


def _run_codex(place: Place, task: str, is_resumed: bool) -> Sequence[str]:
    resume = ["resume", "--last"] if is_resumed else []
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [f"{place.commands}/codex", "exec", *resume, *flags, task]


def _shell_tools(name: str, key: str) -> Tools:
    """Tools of a client that does everything in a shell."""

    def run(command: str) -> Call:
        return Call(name, {key: command})

    return Tools(
        read=lambda path: run(f"cat {path}"),
        shell=run,
        edit=lambda old, new: run(f"sed -i 's/{old}/{new}/' state.txt && cat state.txt"),
    )


CODEX = Client(
    "codex",
    "responses",
    _shell_tools("exec_command", "cmd"),
    _run_codex,
    _configure_codex,
    lambda _: {"OPENAI_API_KEY": KEY},
)


def _run_claude_code(place: Place, task: str, is_resumed: bool) -> Sequence[str]:
    resume = ["--continue"] if is_resumed else []
    return [f"{place.commands}/claude", "-p", *resume, "--dangerously-skip-permissions", task]


CLAUDE_CODE = Client(
    "claude-code",
    "messages",
    Tools(
        read=lambda path: Call("Read", {"file_path": path}),
        shell=lambda command: Call("Bash", {"command": command, "description": "Show a part"}),
        edit=lambda old, new: Call("Edit", {"file_path": "state.txt", "old_string": old, "new_string": new}),
    ),
    _run_claude_code,
    environ=lambda place: {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": KEY,
        "IS_SANDBOX": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    },
    instructions_file="CLAUDE.md",
)


def _make_langgraph(wire: str) -> Client:
    def command(place: Place, task: str, is_resumed: bool) -> Sequence[str]:
        return [f"{place.commands}/python", str(HERE / "langgraph_agent.py"), wire, place.url, task]

    return Client(
        "langgraph",
        wire,
        Tools(
            read=lambda path: Call("read_file", {"path": path}),
            shell=lambda command: Call("run_shell", {"command": command}),
            edit=lambda old, new: Call("replace_text", {"path": "state.txt", "old": old, "new": new}),
        ),
        command,
    )


CLIENTS = (CODEX, CLAUDE_CODE, *map(_make_langgraph, ("chat", "responses", "messages")))
