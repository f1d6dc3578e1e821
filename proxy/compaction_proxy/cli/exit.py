"""Defines what commands share: their options, and how they end.

A command ends with an exit code and, if it fails, with an error message on stderr. If the reader of its
output closes the pipe, it ends without an error.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from compaction_proxy.core.errors import ConfigError, ProxyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compaction_proxy.config.loader import ConfigOverride, LoadedConfig

FAILED = 1  # not found, refused, or any other failure
BAD_CONFIG = 2  # bad configuration or bad usage; typer exits with 2 for bad usage, too
INTERRUPTED = 130
HEADER_FORMAT = "a header is written as 'name: value'"

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Default: $COMPACTION_PROXY_CONFIG, else ./config.yaml."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table, for programs.")]
UpstreamOption = Annotated[str | None, typer.Option("--upstream", help="Base URL of the provider.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Base URL of the proxy; default: as configured.")
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file", metavar="FILE", help="Holds the admin key; default: the configured one."
    ),
]
SessionArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Id of a conversation, or as much of it as no other begins with.")
]


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


def parse_header(text: str) -> tuple[str, str]:
    """Parses a header `name: value`, or a file that holds one. The name is returned in lower case.

    Raises:
        ProxyError: There is no colon.
    """
    header = Path(text).read_text("utf-8") if Path(text).is_file() else text
    name, colon, value = header.strip().partition(":")
    if not colon:
        raise ProxyError(HEADER_FORMAT)
    return name.strip().lower(), value.strip()
