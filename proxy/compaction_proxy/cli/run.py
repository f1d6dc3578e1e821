"""Defines the command `run`, which sends the requests of another command through a proxy."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import FrameType
from typing import Annotated

import typer

from compaction_proxy.cli.admin_client import (
    build_local_url,
    create_local_client,
    fetch_state,
    parse_base_url,
)
from compaction_proxy.cli.console import ConfigOption, UrlOption, load_config_and_print_warnings

# Exit codes that shells use if a command is not found, cannot be executed, or was ended by a signal. For a
# signal, the exit code is `BY_SIGNAL` plus the number of the signal.
NOT_FOUND, NOT_EXECUTABLE, BY_SIGNAL = 127, 126, 128
# Environment variables from which clients read the base URL of an OpenAI-compatible provider.
BASE_URL_VARIABLES = (
    "OPENAI_BASE_URL",  # OpenAI's libraries, and most programs built on them
    "OPENAI_API_BASE",  # LiteLLM, aider, LangChain, LlamaIndex
    "OPENAI_API_BASE_URL",  # Open WebUI
    "AIDER_OPENAI_API_BASE",
    "OPENAI_PROXY_URL",  # LobeChat
    "LLM_BASE_URL",  # OpenHands
)
# Environment variables from which clients read a base URL without `/v1`. These clients add `/v1` themselves.
ROOT_URL_VARIABLES = (
    "OPENAI_HOST",  # goose
    "ANTHROPIC_BASE_URL",  # Claude Code, and Anthropic's libraries
)
# Some programs ignore the base URL in their environment, and read only a configuration file of their own.
# Maps the name of each such program to a text that says what to do instead. Checked in November 2026.
REMEDIES_BY_PROGRAM = {
    "codex": "run `compaction-proxy connect codex --apply --url {root}`, "
    "or pass -c 'openai_base_url=\"{url}\"' to it",
    "cn": "run `compaction-proxy connect continue --apply --url {root}`",
    "cline": "run `cline auth --provider openai --baseurl {url}` with a key and a model",
    "pi": "add a provider with the base URL {url} to ~/.pi/agent/models.json",
}
# Maps the name of a program to the name of the client whose configuration file `connect` can edit.
CONNECT_CLIENTS = {"codex": "codex", "cn": "continue"}
# Commands that run the program of a package without an installation of the package.
PACKAGE_RUNNERS = frozenset({"npx", "bunx", "pnpx"})
# Maps the name of a package to the name of its program, if the two names differ.
PROGRAMS_BY_PACKAGE = {
    "@openai/codex": "codex",
    "@continuedev/cli": "cn",
    "@mariozechner/pi-coding-agent": "pi",
}
KEY_VARIABLE = "OPENAI_API_KEY"
HEADERS_VARIABLE = "OPENAI_CUSTOM_HEADERS"  # read by OpenAI's libraries; holds one header per line
SESSION_HEADER = "x-session-id"
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_SESSION_BYTES = 8


def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD…", help="The command and its arguments.")],
    url: UrlOption = None,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Log file of the temporary proxy.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Run a command with the proxy. Uses the running proxy, or starts a temporary one.

    Exits with the command's exit code, or with 128 plus the number of the signal that ended the command.
    """
    import secrets

    session = f"run-{secrets.token_hex(_SESSION_BYTES)}"
    with _find_or_start_proxy(url, config, log) as (proxy_url, needs_key):
        _warn_if_environment_ignored(command, proxy_url)
        environ = build_environment(os.environ, proxy_url, session, needs_key=needs_key)
        code = _run_command(command, environ)
    raise typer.Exit(code)


def _warn_if_environment_ignored(command: Sequence[str], url: str) -> None:
    """Warns on stderr if the command ignores the base URL in its environment, and says what to do instead.

    Prints nothing if the command line or the program's own configuration file already contains the proxy's
    URL.
    """
    from compaction_proxy.cli.connect import CLIENTS

    base = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    name = _get_program_name(command)
    remedy = REMEDIES_BY_PROGRAM.get(name)
    if remedy is None or any(base in word for word in command):
        return
    tool = CONNECT_CLIENTS.get(name)
    if tool is not None:
        try:
            if base in Path(CLIENTS[tool].destination).expanduser().read_text(encoding="utf-8"):
                return
        except (OSError, UnicodeDecodeError):
            pass
    instructions = remedy.format(url=base, root=base.removesuffix("/v1"))
    print(
        f"compaction-proxy: {name} ignores the base URL in its environment; {instructions}", file=sys.stderr
    )


def _get_program_name(command: Sequence[str]) -> str:
    """Returns the name of the program that a command runs, either directly or through a package runner."""
    name = PurePath(command[0]).name if command else ""
    if name in PACKAGE_RUNNERS:
        package = next((word for word in command[1:] if not word.startswith("-")), "")
        name = package[:1] + package[1:].partition("@")[0]  # cuts off the version
    return PROGRAMS_BY_PACKAGE.get(name, name.removesuffix(".cmd").removesuffix(".exe"))


@contextmanager
def _find_or_start_proxy(
    url: str | None, config: Path | None, log: Path | None
) -> Iterator[tuple[str, bool]]:
    """Yields the base URL of a proxy, and whether clients need a placeholder key.

    The proxy is the one at `url`, else the proxy that runs on this machine, else a new proxy. A new proxy
    stops when the caller's `with` block ends. A proxy that runs on this machine is not used if it listens on
    a Unix socket or uses TLS.

    Clients need a placeholder key if the proxy has a provider key of its own and requires no client keys. For
    a proxy at `url`, this is unknown, and no placeholder is used.

    Args:
        url: Base URL of a proxy. None looks for a proxy on this machine.
        config: Path of the configuration file.
        log: File to which a new proxy writes its output. None discards the output.
    """
    if url is not None:
        yield parse_base_url(url), False
        return
    settings = load_config_and_print_warnings(config)
    server = settings.config.server
    needs_key = bool(settings.config.upstream.api_key.get_secret_value()) and not server.client_keys
    can_be_used = server.unix_socket is None and server.tls_certificate is None
    if can_be_used and fetch_state(create_local_client(server)):
        yield build_local_url(server).removesuffix(server.base_path), needs_key
        return
    from compaction_proxy.cli.workers import run_background_proxy

    with run_background_proxy(settings, log) as proxy_url:
        print(f"compaction-proxy listens on {proxy_url} until the command ends", file=sys.stderr)
        yield proxy_url, needs_key


def build_environment(
    environ: Mapping[str, str], url: str, session: str, *, needs_key: bool = False
) -> dict[str, str]:
    """Builds the environment of a command whose requests go through the proxy.

    Args:
        environ: The environment of this process.
        url: Base URL of the proxy, with or without `/v1`.
        session: Session id that separates the conversations of this run from others. Only OpenAI's libraries
            send this id.
        needs_key: Whether to set a placeholder key if the environment has no key. Many clients do not start
            without a key, even if the proxy has a provider key of its own.
    """
    root = url.rstrip("/").removesuffix("/v1")
    variables = {
        **environ,
        **dict.fromkeys(BASE_URL_VARIABLES, f"{root}/v1"),
        **dict.fromkeys(ROOT_URL_VARIABLES, root),
    }
    lines = [line for line in environ.get(HEADERS_VARIABLE, "").split("\n") if line.strip()]
    if not any(line.partition(":")[0].strip().lower() == SESSION_HEADER for line in lines):
        variables[HEADERS_VARIABLE] = "\n".join([*lines, f"{SESSION_HEADER}: {session}"])
    if needs_key and not environ.get(KEY_VARIABLE):
        variables[KEY_VARIABLE] = "none-needed"
    if any(name in environ or name.upper() in environ for name in _PROXY_VARIABLES):
        # Requests to the proxy on this machine must not go through the configured HTTP proxies.
        current = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        hosts = [host for host in current.split(",") if host.strip()]
        bypassed = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
        variables |= {"no_proxy": bypassed, "NO_PROXY": bypassed}
    return variables


def _run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command, forwards signals to it, and returns the command's exit code as shells report it.

    Does not forward SIGINT if stdin is a terminal, because the terminal itself sends the SIGINT of Ctrl-C to
    the command.
    """
    import subprocess

    try:
        process = subprocess.Popen(list(command), env=dict(environ))  # noqa: S603 - the user asked for this command
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE

    def forward_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signature of a signal handler
        if number != signal.SIGINT or not sys.stdin.isatty():
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, forward_signal)
    code = process.wait()
    return code if code >= 0 else BY_SIGNAL - code
