"""Starts the command-line program. The health check runs without the other commands, to cost little."""

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run_program() -> None:
    """Runs the command that the arguments of this process name, and ends the process with its exit code."""
    _prepare_streams()
    code = _run_health_check(sys.argv[1:])
    if code is None:
        from compaction_proxy.cli.main import app

        app()
    sys.exit(code)


def _prepare_streams() -> None:
    """Makes the standard streams usable, whatever the parent process has made of them.

    A closed stream is opened at the null device. Characters that the encoding of stdout cannot represent are
    escaped. Otherwise, a text of a server or of a client could end a command.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - the stream stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run_health_check(words: Sequence[str]) -> int | None:
    """Runs `health` and `health --url URL`. Returns the exit code.

    Returns None for every other command, and if the address of the proxy is not known without the whole
    configuration.
    """
    match words:
        case ["health"] | ["health", "--url", _]:
            from compaction_proxy.cli.admin_client import AdminClient
            from compaction_proxy.cli.health import check_health, find_local_client

            client = AdminClient(words[2]) if len(words) > 1 else find_local_client(os.environ)
            return None if client is None else check_health(client)
    return None
