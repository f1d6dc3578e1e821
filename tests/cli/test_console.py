"""How commands print and end: tables that fit, figures, and exit codes."""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from compaction_proxy.cli.console import (
    BAD_CONFIG,
    FAILED,
    INTERRUPTED,
    Column,
    color_text,
    confirm_deletion,
    create_group,
    format_age,
    format_count,
    format_dollars,
    format_percent,
    format_quantity,
    format_table,
    format_time,
    get_text,
    load_config_and_print_warnings,
    parse_header,
    print_json,
    print_next_offset,
    read_rows,
    show_progress,
)
from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.support.formatting import escape_unprintable

NO_FIGURE: list[Any] = [None, "7", [7], {}]


def end_with(error: BaseException | None) -> Result:
    """Runs a command that prints a line and ends like this."""
    group = create_group("Help.")

    @group.callback()
    def main() -> None:
        """Make a group of it."""

    @group.command()
    def command() -> None:
        typer.echo("printed")
        if error is not None:
            raise error

    return CliRunner().invoke(group, ["command"])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (ConfigError("store.url: no"), BAD_CONFIG, "store.url: no\n"),
        (ProxyError("not found"), FAILED, "not found\n"),
        (KeyboardInterrupt(), INTERRUPTED, ""),
    ],
    ids=["done", "configuration", "failed", "interrupted"],
)
def test_a_command_ends_with_an_exit_code_and_its_error_on_stderr(
    error: BaseException | None, code: int, message: str
) -> None:
    ended = end_with(error)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (code, "printed\n", message)


def test_a_fault_of_ours_is_no_exit_code() -> None:
    assert isinstance(end_with(ZeroDivisionError()).exception, ZeroDivisionError)


def test_warnings_of_the_configuration_go_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("session: {tenant: none}\nserver: {port: 4242}\n")
    loaded = load_config_and_print_warnings(file)
    assert loaded.config.server.port == 4242
    assert loaded.warnings != ()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [f"warning: {each}" for each in loaded.warnings]


def test_a_header_is_a_name_and_a_value_or_the_file_that_holds_them(tmp_path: Path) -> None:
    assert parse_header(" X-Session-Id:  a:b ") == ("x-session-id", "a:b")
    (tmp_path / "key").write_text("Authorization: Bearer k\n")
    assert parse_header(str(tmp_path / "key")) == ("authorization", "Bearer k")
    for text in ("no colon", ": no name"):
        with pytest.raises(ProxyError, match="name: value"):
            parse_header(text)


def test_a_header_may_be_longer_than_a_path(tmp_path: Path) -> None:
    token = "e" * 5_000
    assert parse_header(f"authorization: Bearer {token}") == ("authorization", f"Bearer {token}")


def test_a_file_that_holds_no_text_is_no_header(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"a: \xff")
    with pytest.raises(ProxyError, match="key: the file is not UTF-8"):
        parse_header(str(tmp_path / "key"))


@given(st.text(st.characters(codec=None)))
def test_whatever_a_server_sends_is_printed_on_one_line_and_moves_no_cursor(text: str) -> None:
    shown = escape_unprintable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


COLUMNS = [
    Column("name"),
    Column("sent", is_right_aligned=True, is_optional=True),
    Column("tokens", is_right_aligned=True),
    Column("end"),
]
ROWS = [["\u5b57", "7", "1,000", ""], ["a\nb", "88", "5", "two words"]]


def test_a_table_is_aligned_by_cells_and_as_wide_as_it_needs() -> None:
    assert format_table(COLUMNS, ROWS, None) == [
        "name  sent  tokens  end",
        "\u5b57       7   1,000",
        "a\\nb    88       5  two words",
    ]


def test_a_narrow_terminal_shows_no_optional_columns_and_says_which() -> None:
    assert format_table(COLUMNS, ROWS, 23) == [
        "name  tokens  end",
        "\u5b57     1,000",
        "a\\nb       5  two words",
        "too narrow for: sent",
    ]


def test_a_narrow_terminal_wraps_texts_and_cuts_no_number() -> None:
    assert format_table(COLUMNS, ROWS, 19)[:-1] == [
        "name  tokens  end",
        "\u5b57     1,000",
        "a\\nb       5  two",
        "              words",
    ]


def test_a_table_without_rows_has_its_titles() -> None:
    assert format_table(COLUMNS, [], None) == ["name  sent  tokens  end"]


def test_what_looks_like_markup_is_text() -> None:
    assert format_table([Column("a")], [["[red]x[/red] :smile:"]], None) == ["a", "[red]x[/red] :smile:"]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "is_colored"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
    ],
)
def test_colour_is_for_terminals_unless_the_environment_says_otherwise(
    stream: io.StringIO, environ: dict[str, str], *, is_colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert color_text("text", 31, stream) == ("\x1b[31mtext\x1b[0m" if is_colored else "text")
    monkeypatch.setattr("sys.stdout", stream)
    table = "\n".join(format_table([Column("state")], [["failed"]], None))
    assert ("\x1b[31m" in table) is is_colored


@pytest.mark.parametrize(
    ("is_terminal", "answer", "yes", "ended_with", "said"),
    [
        (False, "", False, FAILED, "nothing was deleted: without a terminal, --yes is required\n"),
        (False, "", True, 0, ""),
        (True, "n\n", False, FAILED, "Delete it? [y/N]:nothing was deleted\n"),
        (True, "\n", False, FAILED, "Delete it? [y/N]:nothing was deleted\n"),
        (True, "y\n", False, 0, "Delete it? [y/N]:"),
        (True, "", True, 0, ""),
    ],
)
def test_what_is_lost_is_asked_for_and_refused_where_nobody_can_answer(
    *,
    is_terminal: bool,
    answer: str,
    yes: bool,
    ended_with: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer) if is_terminal else io.StringIO(answer))
    code = 0
    try:
        confirm_deletion("Delete it?", yes=yes)
    except typer.Exit as ended:
        code = ended.exit_code
    shown = capsys.readouterr()
    assert (code, shown.out.strip(), shown.err.replace("]: ", "]:")) == (ended_with, "", said)


def test_progress_is_shown_once_something_takes_long_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("compaction_proxy.cli.console.PROGRESS_DELAY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with show_progress("reading\x1b[2J") as report:
        report("half\x1b[2J way", 1, 2)
        deadline = time.monotonic() + 60
        while "50%" not in terminal.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    shown = terminal.getvalue()
    assert "half\\x1b[2J way" in shown
    assert "\x1b[2J" not in shown
    assert shown.endswith(("\x1b[2K", "\x1b[?25h"))  # the line is erased, and the cursor is there again


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_nothing_is_shown_of_what_is_quick_or_not_on_a_terminal(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compaction_proxy.cli.console.PROGRESS_DELAY_S", 3600.0 if stream.isatty() else 0.0)
    monkeypatch.setattr("sys.stderr", stream)
    with show_progress("reading") as report:
        report("reading", 1, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds"), (1_200, "1,200 rounds"), (None, "n/a rounds")],
)
def test_one_is_not_many(count: int | None, shown: str) -> None:
    assert format_quantity(count, "round") == shown


def test_the_next_page_is_named_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[object] = [{"next": 50}, {"next": None}, {}, []]
    for answer in answers:
        print_next_offset(answer)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "more with --offset 50\n")


def test_json_is_printed_in_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": "\u5b57"})
    printed = capsys.readouterr().out
    assert (json.loads(printed), printed.isascii()) == ({"a": "\u5b57"}, True)


@pytest.mark.parametrize(
    ("formatter", "value", "expected"),
    [
        (format_count, 12345, "12,345"),
        (format_count, True, "n/a"),
        (format_dollars, 1234.5, "$1,234.50"),
        (format_dollars, 0, "$0.00"),
        (format_dollars, 0.0123, "$0.0123"),
        (format_dollars, -2, "-$2.00"),
        (format_dollars, False, "n/a"),
        (format_time, 1e30, "n/a"),
    ],
)
def test_a_figure_is_formatted(formatter: Callable[[object], str], value: object, expected: str) -> None:
    assert formatter(value) == expected


@pytest.mark.parametrize("value", NO_FIGURE)
@pytest.mark.parametrize("formatter", [format_count, format_dollars, format_age, format_time])
def test_a_value_of_another_type_is_not_available(formatter: Callable[[object], str], value: object) -> None:
    assert formatter(value) == "n/a"


@pytest.mark.parametrize(
    ("part", "total", "expected"),
    [(64, 100, "64 %"), (1, 3, "33 %"), (0, 5, "0 %"), (1, 0, "n/a"), (1, None, "n/a"), (None, 1, "n/a")],
)
def test_a_part_is_a_percentage_of_a_total_above_nothing(part: object, total: object, expected: str) -> None:
    assert format_percent(part, total) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3_599, "59 min"),
        (7_200, "2 h"),
        (90_000, "1 d"),
        (-5, "0 s"),
    ],
)
def test_an_age_is_told_in_its_largest_unit(seconds: float, expected: str) -> None:
    assert format_age(1_000_000.0 - seconds, 1_000_000.0) == expected


def test_a_field_is_its_text_or_a_dash() -> None:
    row = {"a": 0, "b": "", "c": None, "d": "x"}
    assert [get_text(row, name) for name in "abcde"] == ["0", "-", "-", "x", "-"]


@pytest.mark.parametrize("answer", [None, [], {"rows": None}, {"rows": {}}, {"other": [{}]}])
def test_an_answer_without_such_a_list_has_no_rows(answer: object) -> None:
    assert read_rows(answer, "rows") == []


def test_elements_that_are_no_objects_are_no_rows() -> None:
    assert read_rows({"rows": [{"a": 1}, 7, None, {"b": 2}]}, "rows") == [{"a": 1}, {"b": 2}]
