"""The clients: how each is configured, started and resumed, and how its tools are called."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system.agents.install import VERSIONS, install_program
from tests.system.agents.provider import REQUESTS_PER_TASK, Plan, Tools, plan_move, write_part
from tests.system.agents.wires import Call, Move

HERE = Path(__file__).parent
SESSION_LIMIT_S = 900.0  # of one task; only catches a hang
MODEL = "gpt-5.4-mini"
CLAUDE = "claude-sonnet-4-5"
KEY = "sk-agents"
AIDER_CYCLE = 4  # steps of aider between two files that it adds


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


@dataclass(frozen=True)
class Task:
    """What the client is asked for, at its start or in a session that it resumes."""

    text: str
    is_resumed: bool


def _configure_nothing(place: Place) -> None:
    pass


@dataclass(frozen=True)
class Client:
    """A client on one wire.

    Attributes:
        name: Its name in `versions.json`.
        wire: What it speaks.
        tools: How its tools are called.
        command: Its command line for a task.
        configure: Writes its configuration.
        environ: Its environment variables.
        instructions_file: The project's file of instructions that it reads.
        error_lines: What lines of its output begin with that tell of an error.
        is_step: Tells a step of the session from a side call; None: what has tools is one.
        newest_marks: How messages begin that are as new as the newest, wherever they stand.
        typed: What is typed into it for a task.
    """

    name: str
    wire: str
    tools: Tools
    command: Callable[[Place, Task], Sequence[str]]
    configure: Callable[[Place], None] = _configure_nothing
    environ: Callable[[Place], Mapping[str, str]] = lambda _: {}
    instructions_file: str = "AGENTS.md"
    error_lines: tuple[str, ...] = ("error", "api error", "traceback", "unhandled")
    is_step: Callable[[Any], bool] | None = None
    newest_marks: tuple[str, ...] = ()
    plan: Plan = plan_move
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


def run_client(client: Client, place: Place, task: Task) -> Ended:
    """Run a client for one task, to its end, with nothing of this process's environment."""
    node = install_program("node").parent / "node" / "bin"
    variables = {
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
    process = subprocess.Popen(
        client.command(place, task),
        cwd=place.workspace,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(client.typed(task.text), timeout=SESSION_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        return Ended(-1, f"no end within {SESSION_LIMIT_S:.0f} s: {error.output!r}")
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the client has left running
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(process.returncode, output)


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


def _run_codex(place: Place, task: Task) -> Sequence[str]:
    resume = ["resume", "--last"] if task.is_resumed else []
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [f"{place.commands}/codex", "exec", *resume, *flags, task.text]


def _shell_tools(name: str, key: str) -> Tools:
    """Tools of a client that does everything in a shell."""

    def run(command: str) -> Call:
        return Call(name, {key: command})

    return Tools(
        read=lambda path: run(f"cat {path}"),
        shell=run,
        edit=lambda path, old, new: run(f"sed -i 's/{old}/{new}/' {path} && cat {path}"),
    )


def _write_patch(path: str, old: str, new: str) -> str:
    """A patch of a line, as OpenAI's models write it."""
    return f"*** Begin Patch\n*** Update File: {path}\n@@\n-{old}\n+{new}\n*** End Patch"


CODEX = Client(
    "codex",
    "responses",
    _shell_tools("exec_command", "cmd"),
    _run_codex,
    _configure_codex,
    lambda _: {"OPENAI_API_KEY": KEY},
)


def _run_claude_code(place: Place, task: Task) -> Sequence[str]:
    resume = ["--continue"] if task.is_resumed else []
    return [f"{place.commands}/claude", "-p", *resume, "--dangerously-skip-permissions", task.text]


CLAUDE_CODE = Client(
    "claude-code",
    "messages",
    Tools(
        read=lambda path: Call("Read", {"file_path": path}),
        shell=lambda command: Call("Bash", {"command": command, "description": "Show a part"}),
        edit=lambda path, old, new: Call("Edit", {"file_path": path, "old_string": old, "new_string": new}),
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
    def command(place: Place, task: Task) -> Sequence[str]:
        return [f"{place.commands}/python", str(HERE / "langgraph_agent.py"), wire, place.url, task.text]

    return Client(
        "langgraph",
        wire,
        Tools(
            read=lambda path: Call("read_file", {"path": path}),
            shell=lambda command: Call("run_shell", {"command": command}),
            edit=lambda path, old, new: Call("replace_text", {"path": path, "old": old, "new": new}),
        ),
        command,
    )


def _make_opencode(wire: str) -> Client:
    package = {"chat": "openai-compatible", "responses": "openai", "messages": "anthropic"}[wire]
    model = CLAUDE if wire == "messages" else MODEL

    def configure(place: Place) -> None:
        provider = {
            "npm": f"@ai-sdk/{package}",
            "name": "compaction-proxy",
            "options": {"baseURL": f"{place.url}/v1", "apiKey": KEY},
            "models": {model: {}},
        }
        # Without language servers, which it would download: an edit waits for them.
        place.write_home(
            ".config/opencode/opencode.json", {"lsp": False, "provider": {"compaction-proxy": provider}}
        )

    def command(place: Place, task: Task) -> Sequence[str]:
        resume = ["--continue"] if task.is_resumed else []
        return [
            f"{place.commands}/opencode",
            "run",
            *resume,
            "--auto",
            "-m",
            f"compaction-proxy/{model}",
            task.text,
        ]

    def edit(path: str, old: str, new: str) -> Call:
        if wire == "messages":
            return Call("edit", {"filePath": path, "oldString": old, "newString": new})
        return Call("apply_patch", {"patchText": _write_patch(path, old, new)})

    return Client(
        "opencode",
        wire,
        Tools(
            read=lambda path: Call("read", {"filePath": path}),
            shell=lambda command: Call("bash", {"command": command, "description": "Shows a part"}),
            edit=edit,
        ),
        command,
        configure,
        lambda _: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    )


def _make_qwen_code(wire: str) -> Client:
    kind = {"chat": "openai", "responses": "openai-responses", "messages": "anthropic"}[wire]

    def environ(place: Place) -> Mapping[str, str]:
        if wire == "messages":
            return {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_MODEL": CLAUDE}
        return {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_MODEL": MODEL}

    def configure(place: Place) -> None:
        settings = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
        }
        place.write_home(".qwen/settings.json", settings)

    def command(place: Place, task: Task) -> Sequence[str]:
        resume = ["--continue"] if task.is_resumed else []
        return [f"{place.commands}/qwen", "--yolo", "--auth-type", kind, *resume, "--prompt", task.text]

    return Client(
        "qwen-code",
        wire,
        Tools(
            read=lambda path: Call("read_file", {"file_path": path}),
            shell=lambda command: Call("run_shell_command", {"command": command, "is_background": False}),
            edit=lambda path, old, new: Call(
                "edit", {"file_path": path, "old_string": old, "new_string": new}
            ),
        ),
        command,
        configure,
        environ,
        instructions_file="QWEN.md",
    )


def _make_pi(wire: str) -> Client:
    api = {"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"}[
        wire
    ]
    model = CLAUDE if wire == "messages" else MODEL

    def configure(place: Place) -> None:
        url = place.url if wire == "messages" else f"{place.url}/v1"
        provider = {"baseUrl": url, "api": api, "apiKey": KEY, "models": [{"id": model}]}
        place.write_home(".pi/agent/models.json", {"providers": {"compaction-proxy": provider}})

    def command(place: Place, task: Task) -> Sequence[str]:
        resume = ["--continue"] if task.is_resumed else []
        chosen = ["--provider", "compaction-proxy", "--model", model]
        return [f"{place.commands}/pi", "--print", *resume, *chosen, task.text]

    return Client(
        "pi",
        wire,
        Tools(
            read=lambda path: Call("read", {"path": path}),
            shell=lambda command: Call("bash", {"command": command}),
            edit=lambda path, old, new: Call(
                "edit", {"path": path, "edits": [{"oldText": old, "newText": new}]}
            ),
        ),
        command,
        configure,
        lambda _: {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"},
    )


def _make_continue(wire: str) -> Client:
    # Of OpenAI's models it asks those of the fifth generation by Responses, others by chat completions.
    model = {"chat": "qwen3-coder", "responses": MODEL, "messages": CLAUDE}[wire]

    def configure(place: Place) -> None:
        entry = {
            "name": "compaction-proxy",
            "provider": "anthropic" if wire == "messages" else "openai",
            "model": model,
            "apiBase": f"{place.url}/v1",
            "apiKey": KEY,
            # Beyond it Continue drops messages by itself, and in the end all but one.
            "defaultCompletionOptions": {"contextLength": 1_000_000},
        }
        config = {"name": "agents", "version": "1.0.0", "schema": "v1", "models": [entry]}
        place.write_home(".continue/config.yaml", config)  # JSON is YAML

    def command(place: Place, task: Task) -> Sequence[str]:
        resume = ["--resume"] if task.is_resumed else []
        config = ["--config", str(place.home / ".continue/config.yaml")]
        return [f"{place.commands}/cn", "--print", "--auto", *resume, *config, task.text]

    return Client(
        "continue",
        wire,
        Tools(
            read=lambda path: Call("Read", {"filepath": path}),
            shell=lambda command: Call("Bash", {"command": command}),
            edit=lambda path, old, new: Call(
                "MultiEdit", {"file_path": path, "edits": [{"old_string": old, "new_string": new}]}
            ),
        ),
        command,
        configure,
        lambda _: {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"},
        # It shortens a long conversation by itself, by a request with this text and all tools.
        is_step=lambda body: "Please provide a concise summary of our conversation" not in json.dumps(body),
    )


def _make_cline(wire: str) -> Client:
    model = CLAUDE if wire == "messages" else MODEL
    kind = "anthropic" if wire == "messages" else "openai-compatible"

    def configure(place: Place) -> None:
        settings = {"provider": kind, "apiKey": KEY, "model": model, "baseUrl": f"{place.url}/v1"}
        entry = {"settings": settings, "updatedAt": "2026-11-01T00:00:00.000Z", "tokenSource": "manual"}
        providers = {"version": 1, "lastUsedProvider": kind, "modes": {}, "providers": {kind: entry}}
        place.write_home(".cline/data/settings/providers.json", providers)

    def command(place: Place, task: Task) -> Sequence[str]:
        # By the Agent Client Protocol, as no other way without a terminal resumes a session.
        return [sys.executable, str(HERE / "acp_prompt.py"), task.text, f"{place.commands}/cline", "--acp"]

    def edit(path: str, old: str, new: str) -> Call:
        if wire == "messages":
            return Call("editor", {"path": path, "old_text": old, "new_text": new})
        return Call("apply_patch", {"input": _write_patch(path, old, new)})

    return Client(
        "cline",
        wire,
        Tools(
            read=lambda path: Call("read_files", {"files": [{"path": path}]}),
            shell=lambda command: Call("run_commands", {"commands": [command]}),
            edit=edit,
        ),
        command,
        configure,
        lambda _: {
            "CLINE_PROVIDER": kind,
            "CLINE_MODEL": model,
            "CLINE_API_KEY": KEY,
            "CLINE_NO_AUTO_UPDATE": "1",
        },
    )


def _plan_aider(tools: Tools, workspace: Path, step: int) -> Move:
    """A file that an answer names is added to the chat, and aider asks again at once; it calls no tools."""
    place = step % REQUESTS_PER_TASK
    if place == REQUESTS_PER_TASK - 1:
        return Move("All parts are read.")
    if place % AIDER_CYCLE == 1:
        return Move(f"Step {step}: I need `notes/part-{step:03}.txt`.")
    if place % AIDER_CYCLE == AIDER_CYCLE - 1:
        return Move(f"Step {step}: I note it.\n\nstate.txt\n```\nstate: {step}\n```\n")
    return Move(f"Step {step}: {write_part(step)[: AIDER_CYCLE * 100]}")


def _is_aider_step(body: Any) -> bool:
    texts = json.dumps(body)
    return not any(
        mark in texts for mark in ("generates concise, one-line Git commit", "*Briefly* summarize")
    )


def _type_into_aider(task: str) -> str:
    # Of each cycle, the step behind the one that names a file comes by itself.
    lines = REQUESTS_PER_TASK - REQUESTS_PER_TASK // AIDER_CYCLE
    return "".join([f"{task}\n", *(f"Go on with line {k} of the list.\n" for k in range(1, lines))])


def _make_aider(wire: str) -> Client:
    model = f"anthropic/{CLAUDE}" if wire == "messages" else f"openai/{MODEL}"

    def environ(place: Place) -> Mapping[str, str]:
        keys = {
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_API_BASE": place.url,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        return {**keys, "OPENAI_API_KEY": KEY, "OPENAI_API_BASE": f"{place.url}/v1"}

    def command(place: Place, task: Task) -> Sequence[str]:
        resume = ["--restore-chat-history"] if task.is_resumed else []
        quiet = ["--no-check-update", "--no-analytics", "--no-show-model-warnings", "--no-show-release-notes"]
        chosen = ["--model", model, "--yes-always", "--no-gitignore", "--read", "CONVENTIONS.md"]
        chosen += ["--edit-format", "whole"]  # the script's edits; the default depends on the model
        return [f"{place.commands}/aider", *chosen, *quiet, *resume]

    return Client(
        "aider",
        wire,
        Tools(read=Call, shell=Call, edit=lambda path, old, new: Call(path)),
        command,
        environ=environ,
        instructions_file="CONVENTIONS.md",
        error_lines=("litellm.", "error", "traceback"),
        is_step=_is_aider_step,
        newest_marks=("I have *added these files to the chat*",),
        plan=_plan_aider,
        typed=_type_into_aider,
    )


def _make_openhands(wire: str) -> Client:
    model = {"chat": "openai/qwen3-coder", "responses": f"openai/{MODEL}", "messages": f"anthropic/{CLAUDE}"}[
        wire
    ]

    def command(place: Place, task: Task) -> Sequence[str]:
        url = place.url if wire == "messages" else f"{place.url}/v1"
        return [f"{place.commands}/python", str(HERE / "openhands_agent.py"), model, url, task.text]

    return Client(
        "openhands",
        wire,
        Tools(
            read=lambda path: Call("file_editor", {"command": "view", "path": path, "security_risk": "LOW"}),
            shell=lambda command: Call("terminal", {"command": command, "security_risk": "LOW"}),
            edit=lambda path, old, new: Call(
                "file_editor",
                {
                    "command": "str_replace",
                    "path": path,
                    "old_str": old,
                    "new_str": new,
                    "security_risk": "LOW",
                },
            ),
        ),
        command,
        environ=lambda _: {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"},
    )


ALL_WIRES = ("chat", "responses", "messages")
CLIENTS = (
    CODEX,
    CLAUDE_CODE,
    *map(_make_langgraph, ALL_WIRES),
    *map(_make_opencode, ALL_WIRES),
    *map(_make_qwen_code, ALL_WIRES),
    *map(_make_pi, ALL_WIRES),
    *map(_make_continue, ALL_WIRES),
    *map(_make_cline, ("chat", "messages")),
    *map(_make_aider, ("chat", "messages")),
    *map(_make_openhands, ALL_WIRES),
)
