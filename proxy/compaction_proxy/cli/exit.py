"""How commands end: with which exit code, with one line on stderr, and silently where a pipe closes."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

from compaction_proxy.core.errors import ConfigError, ProxyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compaction_proxy.config.environment import ConfigOverride
    from compaction_proxy.config.loader import LoadedConfig

FAILED = 1  # not found, refused, or it did not work
BAD_CONFIG = 2  # or bad usage, which is what the command line's library says, too
INTERRUPTED = 130


class CommandGroup(TyperGroup):
    """Commands, each of which may raise what it likes to end with."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - the library's context and the command's answer
        """Run a command.

        A reader that has left, as `head` does, is no failure of ours.
        """
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
        except ConfigError as error:
            exit_with_error(error, BAD_CONFIG)
        except ProxyError as error:
            exit_with_error(error, FAILED)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # What is still held back must not be tried again while the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        return answer


def create_group(help_text: str, name: str | None = None) -> typer.Typer:
    """A group of commands that end as ours do."""
    return typer.Typer(
        name=name,
        cls=CommandGroup,
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def exit_with_error(error: ProxyError | str, code: int) -> NoReturn:
    """End the process with a line on stderr."""
    print(error, file=sys.stderr)
    raise typer.Exit(code)


def load_with_warnings(path: Path | None, options: "Iterable[ConfigOverride]" = ()) -> "LoadedConfig":
    """The configuration; its warnings go to stderr.

    Raises:
        ConfigError: It cannot be used; a line for each problem.
    """
    from compaction_proxy.config.loader import load_config

    found = load_config(path, os.environ, options)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return found
