"""Defines how commands end: with an exit code and, if they fail, with an error message on stderr.

If the reader of a command's output closes the pipe, the command ends without an error.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

from compaction_proxy.core.errors import ConfigError, ProxyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compaction_proxy.config.loader import ConfigOverride, LoadedConfig

FAILED = 1  # not found, refused, or any other failure
BAD_CONFIG = 2  # bad configuration or bad usage; typer exits with 2 for bad usage, too
INTERRUPTED = 130


class CommandGroup(TyperGroup):
    """Command group that turns the exceptions of its commands into exit codes."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's context and the command's result
        """Runs a command and maps its exceptions to exit codes.

        If the reader of the output closes the pipe early, as `head` does, the command counts as successful.
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
            # Buffered output goes to /dev/null. Otherwise, the interpreter would write it to the closed pipe
            # again when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        return answer


def create_group(help_text: str, name: str | None = None) -> typer.Typer:
    """Creates a command group that turns exceptions of its commands into exit codes."""
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
    """Prints an error on stderr and ends the command with an exit code."""
    print(error, file=sys.stderr)
    raise typer.Exit(code)


def load_config_and_print_warnings(
    path: Path | None, options: "Iterable[ConfigOverride]" = ()
) -> "LoadedConfig":
    """Loads the configuration and prints its warnings on stderr.

    Raises:
        ConfigError: The configuration cannot be used. The message has a line for each problem.
    """
    from compaction_proxy.config.loader import load_config

    loaded = load_config(path, os.environ, options)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded
