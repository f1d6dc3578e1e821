"""The command line, with those commands only read that go on until they are interrupted."""

import os
import sys

import typer

from compaction_proxy.cli.main import app
from compaction_proxy.config.loader import load_config

ENDLESS = {"serve", "watch", "demo", "demo-provider"}


def main() -> None:
    """Run the command, or see that it would be understood, with a configuration that can be used."""
    name, *rest = sys.argv[1:] or [""]
    if name not in ENDLESS:
        app()
    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]  # it is a group
    command.make_context(name, rest)
    load_config(None, os.environ)


if __name__ == "__main__":
    main()
