"""Defines what several commands share: common options, output, and exit codes.

`CommandGroup` turns a `ProxyError` of a command into an error message on stderr and an exit code other than
0. If the program that reads a command's output closes the pipe, the exit code is 0.

Tables and displays of progress are made by the library rich. It is imported only where one is shown, so that
other commands start quickly. Tables escape control characters. Functions that format a figure, such as
`format_count`, take a value from JSON. They return `n/a` if the value is not a number.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TextIO, TypeGuard

import typer
from typer.core import TyperGroup

from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.support import formatting
from compaction_proxy.support.formatting import escape_unprintable

if TYPE_CHECKING:
    from compaction_proxy.config.loader import ConfigOverride, LoadedConfig

FAILED = 1  # not found, refused, or any other failure
BAD_CONFIG = 2  # bad configuration or bad usage; typer exits with 2 for bad usage, too
INTERRUPTED = 130
HEADER_FORMAT = "write a header as 'name: value'"

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Configuration file. Default: $COMPACTION_PROXY_CONFIG or ./config.yaml.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UpstreamOption = Annotated[str | None, typer.Option("--upstream", help="Base URL of the provider.")]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Base URL of the proxy. Default: from the configuration."),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file", metavar="FILE", help="File with the admin key. Default: the configured key."
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
SessionArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="Conversation id or a unique prefix of it, or the client's own session id.",
    ),
]
UNKNOWN = "n/a"
# Numbers of colours and of a style, as terminals know them.
RED, YELLOW, DIM = 31, 33, 2
# The colours of words at the beginning of a cell.
_STYLES = {
    **dict.fromkeys(("applied", "ok", "reused"), "green"),
    **dict.fromkeys(("bypassed", "note", "scheduled", "shadow", "warning"), "yellow"),
    **dict.fromkeys(("error", "failed", "failed-open", "over-limit"), "red"),
    **dict.fromkeys(("-", UNKNOWN, "undone"), "dim"),
}
_GAP = "  "
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3_600, 86_400
# The least width, in cells, of a text in a narrow table, unless the text is shorter.
MIN_TEXT_CELLS = 20
# Seconds after which a command shows that it is busy, and seconds between two updates of this display.
PROGRESS_DELAY_S, PROGRESS_INTERVAL_S = 1.0, 0.1


# The exception for bad usage. Versions of typer have it in different modules.
_UsageError: Any = typer.BadParameter.__mro__[1]


class CommandGroup(TyperGroup):
    """A command group that turns the exceptions of its commands into exit codes."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - those of typer
        """Parses the arguments of the group. Ends the program with an error if they are not valid."""
        try:
            return super().make_context(*args, **kwargs)
        except _UsageError as error:
            _exit_with_usage_error(error)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's context and the command's result
        """Runs a command. Ends the program with an exit code if the command raises an expected exception.

        The exit code is 2 for `ConfigError` and for bad usage, 1 for any other `ProxyError`, and 130 for
        Ctrl-C. If the program that reads the output closes the pipe early, as `head` does, it is 0.
        """
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
        except _UsageError as error:
            _exit_with_usage_error(error)
        except ConfigError as error:
            exit_with_error(error, BAD_CONFIG)
        except ProxyError as error:
            exit_with_error(error, FAILED)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Stdout is redirected to /dev/null. Otherwise, the interpreter would try to write buffered output
            # to the closed pipe again when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        return answer


def create_group(help_text: str, name: str | None = None) -> typer.Typer:
    """Creates a group of commands, which turns the exceptions of its commands into exit codes.

    `name` is the name that the help text shows. None leaves the choice of the name to typer.
    """
    return typer.Typer(
        name=name,
        cls=CommandGroup,
        help=help_text,
        context_settings={"help_option_names": ["--help", "-h"]},
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def exit_with_error(error: ProxyError | str, code: int) -> NoReturn:
    """Prints an error on stderr and ends the command with the exit code `code`."""
    print(color_text(error, RED, sys.stderr), file=sys.stderr)
    raise typer.Exit(code)


def _exit_with_usage_error(error: Any) -> NoReturn:  # noqa: ANN401 - see `_UsageError`
    """Prints in one line what is wrong with the arguments of a command, and ends the command.

    Raises `error` itself if a command without arguments only has to show its help.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        raise error
    text = escape_unprintable(error.format_message().rstrip("."))
    exit_with_error(f"{text}; see `{error.ctx.command_path} --help`" if error.ctx else text, BAD_CONFIG)


def load_config_and_print_warnings(
    path: Path | None, options: "Iterable[ConfigOverride]" = ()
) -> "LoadedConfig":
    """Loads the configuration and prints its warnings on stderr.

    Raises:
        ConfigError: If the configuration is not valid. The message has a line for each problem.
    """
    from compaction_proxy.config.loader import load_config

    loaded = load_config(path, os.environ, options)
    for warning in loaded.warnings:
        print(color_text(f"warning: {warning}", YELLOW, sys.stderr), file=sys.stderr)
    return loaded


def confirm_deletion(question: str, *, yes: bool) -> None:
    """Asks whether the command may delete data. Ends the command with an error unless the answer is yes.

    Does not ask if `yes` is true. If stdin is not a terminal, nobody can answer, so the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        exit_with_error("nothing was deleted: without a terminal, --yes is required", FAILED)
    if not typer.confirm(question, err=True):
        exit_with_error("nothing was deleted", FAILED)


@contextmanager
def show_progress(activity: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows on stderr that the command is busy, if that takes longer than `PROGRESS_DELAY_S`.

    The display is a line that disappears at the end of the `with` block. If stderr is not a terminal, nothing
    is shown.

    Yields a function that reports progress: what the command is doing, how much of it is done, and how much
    there is.
    """
    if not sys.stderr.isatty():
        yield lambda _activity, _done, _total: None
        return
    import threading

    latest: tuple[str, int, int | None] = (activity, 0, None)
    has_ended = threading.Event()

    def display() -> None:
        if has_ended.wait(PROGRESS_DELAY_S):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        with Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True, color_system="standard" if is_colored(sys.stderr) else None),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as progress:
            task = progress.add_task(escape_unprintable(activity), total=None)
            while not has_ended.wait(PROGRESS_INTERVAL_S):
                what, done, total = latest
                progress.update(task, description=escape_unprintable(what), completed=done, total=total)

    def report(what: str, done: int, total: int) -> None:
        nonlocal latest
        latest = (what, done, total)

    thread = threading.Thread(target=display, daemon=True)
    thread.start()
    try:
        yield report
    finally:
        has_ended.set()
        thread.join()


def parse_header(text: str) -> tuple[str, str]:
    """Parses a header `name: value`. Returns the name in lower case, and the value.

    `text` is the header, or the path of a file that contains the header.

    Raises:
        ProxyError: If the file cannot be read, or if the header has no name or no colon.
    """
    try:
        is_file = Path(text).is_file()
    except OSError:  # a header may be longer than a path can be
        is_file = False
    try:
        header = Path(text).read_text("utf-8") if is_file else text
    except OSError as error:
        raise ProxyError(f"{text}: cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ProxyError(f"{text}: the file is not UTF-8") from None
    name, colon, value = header.strip().partition(":")
    if not colon or not name.strip():
        raise ProxyError(HEADER_FORMAT)
    return name.strip().lower(), value.strip()


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: Heading of the column.
        is_right_aligned: Whether the texts in the column are aligned to the right, as numbers are.
        is_optional: Whether the column is left out if the terminal is too narrow.
    """

    title: str
    is_right_aligned: bool = False
    is_optional: bool = False


def is_colored(stream: TextIO) -> bool:
    """Returns whether text on a stream is coloured: on a terminal, or if `FORCE_COLOR` is set.

    If `NO_COLOR` is set, nothing is coloured.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def color_text(text: object, color: int, stream: TextIO) -> str:
    """Returns a text in a colour, given as a number such as `RED`, or plain if the stream is not coloured."""
    return f"\x1b[{color}m{text}\x1b[0m" if is_colored(stream) else str(text)


def get_terminal_width() -> int | None:
    """Returns the width of the terminal in cells, or None if stdout is not a terminal."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def format_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], max_cells: int | None
) -> list[str]:
    """Formats a table as lines, with the column titles first. Escapes unprintable characters in cells.

    Args:
        columns: The columns from left to right.
        rows: Rows with one text for each column.
        max_cells: Maximum width of a line, in terminal cells. In a wider table, wraps texts that are neither
            in the first column nor aligned to the right. If that leaves less than `MIN_TEXT_CELLS` for such a
            text, leaves out optional columns instead, the last one first, and names them in an additional
            last line. None keeps all columns and wraps nothing.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[escape_unprintable(text) for text in row] for row in rows]
    can_wrap = [index > 0 and not each.is_right_aligned for index, each in enumerate(columns)]
    widths = [
        max(map(cell_len, texts)) + len(_GAP)
        for texts in zip([each.title for each in columns], *cells, strict=True)
    ]
    needed = [
        min(width, MIN_TEXT_CELLS + len(_GAP)) if wraps else width
        for width, wraps in zip(widths, can_wrap, strict=True)
    ]
    shown = list(range(len(columns)))
    for index in reversed(range(len(columns))):
        if max_cells is None or sum(needed[each] for each in shown) - len(_GAP) <= max_cells:
            break
        if columns[index].is_optional:
            shown.remove(index)
    table = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold")
    for index in shown:
        column = columns[index]
        table.add_column(
            column.title,
            justify="right" if column.is_right_aligned else "left",
            no_wrap=not can_wrap[index],
            overflow="fold",
        )
    for row in cells:
        table.add_row(*(Text(row[index], _choose_style(row[index])) for index in shown))
    console = Console(
        width=max_cells or sum(widths), color_system="standard" if is_colored(sys.stdout) else None
    )
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    if len(shown) < len(columns):
        names = ", ".join(each.title for index, each in enumerate(columns) if index not in shown)
        lines.append(color_text(f"too narrow for: {names}", DIM, sys.stdout))
    return lines


def _choose_style(text: str) -> str:
    """Returns the style in which a table shows a text: that of its first word, or red for a loss of money."""
    return "red" if text.startswith("-$") else _STYLES.get(text.partition(" ")[0], "")


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines. The lines must not contain control characters."""
    for line in lines:
        print(line)


def print_json(value: object) -> None:
    """Prints a value as indented JSON, in ASCII."""
    print(json.dumps(value, indent=2))


def format_count(value: object) -> str:
    """Formats a count with thousands separators, such as `12,345`; `n/a` if it is not a number."""
    return f"{value:,}" if _is_number(value) else UNKNOWN


def format_quantity(value: object, noun: str) -> str:
    """Formats a count with its noun, such as `1 record`; `n/a records` if the count is not a number."""
    return formatting.format_quantity(value if _is_number(value) else None, noun)


def format_dollars(value: object) -> str:
    """Formats an amount in dollars, such as `$1.23`; `n/a` if it is not a number.

    The result has two decimals. If the amount is between -1 and 1 and not 0, the result has four decimals.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return UNKNOWN
    digits = 2 if abs(value) >= 1 or value == 0 else 4
    return f"{'-' if value < 0 else ''}${abs(value):,.{digits}f}"


def format_percent(part: object, total: object) -> str:
    """Formats a part as a percentage of a total, such as `64 %`.

    Returns `n/a` if the total is not above 0, or if one of the values is not a number.
    """
    if not (isinstance(part, int | float) and isinstance(total, int | float)) or total <= 0:
        return UNKNOWN
    return f"{part / total:.0%}".replace("%", " %")


def format_age(timestamp_s: object, now: float | None = None) -> str:
    """Formats the time since a moment in whole days, hours, minutes or seconds, such as `5 min`.

    Returns `n/a` if the moment is not a number.

    Args:
        timestamp_s: The moment, in seconds since the epoch.
        now: The moment up to which the time is measured, in seconds since the epoch. None means the current
            time.
    """
    if not isinstance(timestamp_s, int | float):
        return UNKNOWN
    age = max(0.0, (time.time() if now is None else now) - timestamp_s)
    for unit_s, name in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if age >= unit_s:
            return f"{age // unit_s:.0f} {name}"
    return f"{age:.0f} s"


def format_time(timestamp_s: object, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Formats a moment, given in seconds since the epoch, as local time. `pattern` is a `strftime` format.

    Returns `n/a` if the moment is not a number or is out of range.
    """
    if not isinstance(timestamp_s, int | float):
        return UNKNOWN
    try:
        return time.strftime(pattern, time.localtime(timestamp_s))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def get_text(row: Mapping[str, object], name: str) -> str:
    """Returns the field `name` of a row as text, or a dash if the field is missing or empty."""
    value = row.get(name)
    return "-" if value in (None, "") else str(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def print_next_offset(answer: object) -> None:
    """Prints on stderr the offset of the next page, if the response `answer` has one."""
    following = answer.get("next") if isinstance(answer, dict) else None
    if isinstance(following, int):
        print(f"more with --offset {following}", file=sys.stderr)


def read_rows(answer: object, name: str) -> list[dict[str, Any]]:
    """Returns the JSON objects in the list that a response has as its field `name`.

    Skips elements of the list that are not objects. Returns an empty list if the field is not a list.
    """
    values = answer.get(name) if isinstance(answer, dict) else None
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
