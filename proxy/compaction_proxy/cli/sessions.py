"""Defines the commands `sessions` and `search`, with which users view and control stored conversations.

The commands call the admin API of a running proxy. The output shows `n/a` for a figure that the proxy does
not know.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from compaction_proxy.cli.admin_client import AdminClient, create_admin_client
from compaction_proxy.cli.console import (
    BAD_CONFIG,
    FAILED,
    UNKNOWN,
    Column,
    ConfigOption,
    JsonOption,
    KeyOption,
    SessionArgument,
    UrlOption,
    YesOption,
    confirm_deletion,
    create_group,
    exit_with_error,
    format_age,
    format_count,
    format_dollars,
    format_percent,
    format_quantity,
    format_table,
    format_time,
    get_terminal_width,
    get_text,
    print_json,
    print_lines,
    print_next_offset,
    read_rows,
)
from compaction_proxy.support.formatting import (
    WHOLE_ID_HINT,
    describe_failed_requests,
    describe_missing_dollars,
    describe_request_after_undo,
    describe_round_state,
    describe_status,
    encode_path_segment,
    escape_unprintable,
    format_milliseconds,
    get_event_word,
)

sessions_app = create_group("Show and control the conversations of a running proxy.")
ORDERS = ("last", "tokens", "net", "requests")
MAX_LISTED = 1_000
LimitOption = Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="Maximum number of results.")]
OffsetOption = Annotated[int, typer.Option(min=0, help="Number of results to skip.")]
JsonRow = Mapping[str, Any]

_CONVERSATION_COLUMNS = (
    Column("id"),
    Column("model"),
    Column("status", is_optional=True),
    Column("used", is_right_aligned=True),
    *(
        Column(title, is_right_aligned=True, is_optional=True)
        for title in ("requests", "rounds", "last sent", "last read", "cached", "cost")
    ),
    Column("net saved", is_right_aligned=True),
)
_CAPTION_FIELDS = ("label", "name", "title")
_ROUND_COLUMNS = (
    Column("round", is_right_aligned=True),
    Column("made"),
    Column("strategy"),
    Column("reason", is_optional=True),
    Column("messages", is_right_aligned=True, is_optional=True),
    Column("before", is_right_aligned=True),
    Column("after", is_right_aligned=True),
    Column("cost", is_right_aligned=True, is_optional=True),
    Column("pays back after", is_right_aligned=True, is_optional=True),
    Column("state"),
)
_EXCHANGE_COLUMNS = (
    Column("time"),
    Column("status"),
    Column("code", is_right_aligned=True),
    Column("model"),
    Column("sent", is_right_aligned=True),
    Column("forwarded", is_right_aligned=True),
    *(
        Column(title, is_right_aligned=True, is_optional=True)
        for title in ("counted", "cached", "answer", "overhead")
    ),
    Column("net saved", is_right_aligned=True),
)
_EVENT_COLUMNS = (
    Column("time"),
    Column("event"),
    Column("strategy", is_optional=True),
    Column("round", is_right_aligned=True),
    *(Column(title, is_right_aligned=True, is_optional=True) for title in ("before", "after", "cost")),
    Column("reason"),
)
_PIN_COLUMNS = (Column("pin"), Column("text"))
_HIT_COLUMNS = (
    Column("message"),
    Column("turn", is_right_aligned=True, is_optional=True),
    Column("round", is_right_aligned=True, is_optional=True),
    Column("role"),
    Column("text"),
)
_SAVED_TOKENS_FIELDS = (
    ("tokens saved, gross", "gross_tokens"),
    ("tokens for summaries", "summary_tokens"),
    ("tokens saved, net", "net_tokens"),
)
_MONEY_FIELDS = (
    ("cost", "cost_usd"),
    ("gross saving", "gross_usd"),
    ("cache loss", "cache_loss_usd"),
    ("summaries", "summary_usd"),
    ("net saved", "net_usd"),
)


def _resolve_conversation(
    session: str, url: str | None, key_file: Path | None, config: Path | None
) -> tuple[AdminClient, str, str]:
    """Finds a conversation. `session` is its id, the beginning of its id, or the client's own id of it.

    Returns:
        A client of the admin API, the conversation's id, and the conversation's path in the admin API.
    """
    client = create_admin_client(url, key_file, config)
    conversation_id = client.find_conversation_id(session)
    return client, conversation_id, f"/conversations/{encode_path_segment(conversation_id)}"


@sessions_app.command("list")
def list_conversations(  # noqa: PLR0913, PLR0917 - one for each option
    sort: Annotated[
        str,
        typer.Option(help=f"Sort order, largest first: {', '.join(ORDERS)}.", autocompletion=lambda: ORDERS),
    ] = "last",
    limit: LimitOption = 50,
    offset: OffsetOption = 0,
    search: Annotated[
        str | None, typer.Option(help="Part of an id, a model or a label, or the client's own session id.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Part of a model's name.")] = None,
    key: Annotated[
        str | None, typer.Option(help="Name of a client key, k_…, as in `savings --by key`.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Label from the request header `x-compaction-label`.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="Strategy of the compaction in use.")] = None,
    status: Annotated[str | None, typer.Option(help="Status of the last request.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Used after this time: an age such as 90m, 24h or 7d, or Unix seconds.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="Used before this time: an age such as 90m, 24h or 7d, or Unix seconds."),
    ] = None,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List conversations. The default order is the most recently used first."""
    if sort not in ORDERS:
        exit_with_error(f"--sort: choose one of {', '.join(ORDERS)}", BAD_CONFIG)
    answer = create_admin_client(url, key_file, config).get(
        "/conversations",
        limit=limit,
        sort=sort,
        q=search,
        offset=offset or None,
        model=model,
        key=key,
        label=label,
        strategy=strategy,
        status=status,
        since=since,
        until=until,
    )
    if as_json:
        print_json(answer)
        return
    rows = read_rows(answer, "conversations")
    print_lines(format_conversations(rows, get_terminal_width()))
    if search and not rows:
        print(f"Nothing found. {WHOLE_ID_HINT}")
    print_next_offset(answer)


@sessions_app.command()
def show(
    session: SessionArgument,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a conversation: its usage, its savings, its compactions and its pins."""
    client, _, path = _resolve_conversation(session, url, key_file, config)
    record = client.get(path)
    rounds = read_rows(client.get(f"{path}/compactions"), "compactions")
    if as_json:
        print_json({"conversation": record, "compactions": rounds})
        return
    last = read_rows(client.get(f"{path}/exchanges", limit=1), "exchanges")
    record = record if isinstance(record, dict) else {}
    print_lines(format_conversation(record, last[-1] if last else {}, rounds, get_terminal_width()))


@sessions_app.command()
def exchanges(
    session: SessionArgument,
    limit: LimitOption = 50,
    offset: OffsetOption = 0,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the newest requests of a conversation and their responses, oldest first."""
    client, _, path = _resolve_conversation(session, url, key_file, config)
    answer = client.get(f"{path}/exchanges", limit=limit, offset=offset or None)
    if as_json:
        print_json(answer)
        return
    cells = [_format_exchange(row) for row in read_rows(answer, "exchanges")]
    print_lines(format_table(_EXCHANGE_COLUMNS, cells, get_terminal_width()))
    print_next_offset(answer)


@sessions_app.command()
def events(
    session: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="Conversation id, prefix or session id. Default: all conversations."
        ),
    ] = None,
    limit: LimitOption = 50,
    offset: OffsetOption = 0,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the newest events, such as compactions, oldest first."""
    if session is None:
        client, path = create_admin_client(url, key_file, config), ""
    else:
        client, _, path = _resolve_conversation(session, url, key_file, config)
    answer = client.get(f"{path}/events", limit=limit, offset=offset or None)
    if as_json:
        print_json(answer)
        return
    rows = read_rows(answer, "events")
    if session is None:  # the events of all conversations come newest first
        rows.reverse()
    columns = _EVENT_COLUMNS if session else (Column("conversation"), *_EVENT_COLUMNS)
    cells = [[*([] if session else [get_text(row, "conversation")]), *_format_event(row)] for row in rows]
    print_lines(format_table(columns, cells, get_terminal_width()))
    print_next_offset(answer)


@sessions_app.command()
def compact(
    session: SessionArgument,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compact the next request of a conversation."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    answer = client.send("POST", f"{path}/compact")
    _print_result(answer, f"{name}: the proxy will compact the next request", as_json=as_json)


@sessions_app.command()
def undo(
    session: SessionArgument,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Undo the latest compaction. Also discards prepared compactions.

    The next request uses the compaction before it, or is sent in full. Automatic compaction is paused, unless
    a request exceeds the hard mark (`hard_percent` of the strategy). To prevent that too, use
    `sessions bypass` or the request header `x-compaction: bypass`.
    """
    client, name, path = _resolve_conversation(session, url, key_file, config)
    answer = client.send("POST", f"{path}/undo")
    row = answer if isinstance(answer, dict) else {}
    _print_result(answer, f"{name}: " + "\n".join(_describe_undo(row)), as_json=as_json)


@sessions_app.command()
def redo(
    session: SessionArgument,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Redo the compaction that was undone last. This is possible until a new compaction is made."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    answer = client.send("POST", f"{path}/redo")
    row = answer if isinstance(answer, dict) else {}
    _print_result(answer, f"{name}: redid {_describe_round(row)}", as_json=as_json)


@sessions_app.command()
def pin(
    session: SessionArgument,
    text: Annotated[
        str, typer.Argument(help="Text to keep word for word: one line, up to 2,000 characters.")
    ],
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pin a text to a conversation, so that every compaction keeps the text word for word."""
    client, _, path = _resolve_conversation(session, url, key_file, config)
    _print_pins(client.send("POST", f"{path}/pins", {"text": text}), as_json=as_json)


@sessions_app.command()
def unpin(
    session: SessionArgument,
    pin_id: Annotated[str, typer.Argument(metavar="PIN", help="Id of the pin, from `sessions show`.")],
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a pin from a conversation."""
    client, _, path = _resolve_conversation(session, url, key_file, config)
    _print_pins(client.send("DELETE", f"{path}/pins/{encode_path_segment(pin_id)}"), as_json=as_json)


@sessions_app.command()
def bypass(
    session: SessionArgument,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forward a conversation's requests unchanged until `sessions resume` ends the bypass."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    answer = client.send("POST", f"{path}/bypass")
    line = f"{name}: the proxy forwards requests unchanged until `sessions resume {name}`"
    _print_result(answer, line, as_json=as_json)


@sessions_app.command()
def resume(
    session: SessionArgument,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """End the bypass of a conversation, so that its requests are compacted again."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    answer = client.send("POST", f"{path}/resume")
    _print_result(answer, f"{name}: compaction is on again", as_json=as_json)


@sessions_app.command()
def export(
    session: SessionArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="New file to write. Default: standard output."),
    ] = None,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Write all stored data of a conversation as JSON. The data includes the conversation's text."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    record = client.get(f"{path}/export")
    if output is None:
        print_json(record)
        return
    _write_export(output, record)
    print(f"{name}: saved to {output}")


def _write_export(path: Path, export: Any) -> None:  # noqa: ANN401 - JSON
    """Writes an export as JSON to a new file that only its owner can read.

    Ends the command with an error if the file exists or cannot be written.
    """
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(export, file, indent=2)
            file.write("\n")
    except FileExistsError:
        exit_with_error(f"{path}: already exists and was not changed", FAILED)
    except OSError as error:
        exit_with_error(f"{path}: cannot write the file: {error.strerror}", FAILED)


@sessions_app.command()
def delete(
    session: SessionArgument,
    tenant: Annotated[
        bool, typer.Option("--tenant", help="Delete all conversations of the same tenant.")
    ] = False,
    yes: YesOption = False,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete all stored data of a conversation."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    target = f"all conversations of the tenant of {name}" if tenant else name
    confirm_deletion(f"Permanently delete all stored data of {target}?", yes=yes)
    answer = client.send("DELETE", f"{path}/tenant" if tenant else path)
    number = answer.get("deleted") if isinstance(answer, dict) else None
    _print_result(answer, f"{name}: {format_quantity(number, 'record')} deleted", as_json=as_json)


def _print_result(answer: object, line: str, *, as_json: bool) -> None:
    """Prints what a command did: the proxy's response as JSON, or a line of text."""
    if as_json:
        print_json(answer)
    else:
        print(line)


def _describe_round(row: JsonRow) -> str:
    """Returns which compaction a row is about, such as `round 2 of anchored, made 2026-11-22 13:05:09`."""
    strategy = f" of {row['strategy']}" if row.get("strategy") else ""
    return escape_unprintable(f"round {get_text(row, 'round')}{strategy}, made {format_time(row.get('at'))}")


def _describe_undo(answer: JsonRow) -> Iterator[str]:
    """Yields lines on what an undo has changed. `answer` is the response of the admin API."""
    yield f"undid the latest compaction: {_describe_round(answer)}"
    dropped = [str(each) for each in answer.get("dropped") or () if isinstance(each, int)]
    if dropped:
        yield f"Also discarded prepared compactions: round {', '.join(dropped)}."
    remaining, hard_tokens = (
        each if isinstance(each := answer.get(name), int) else None for name in ("remaining", "hard_tokens")
    )
    strategy = escape_unprintable(str(answer.get("remaining_strategy") or ""))
    yield (
        f"{describe_request_after_undo(remaining, hard_tokens, strategy)} `sessions bypass`, or the request "
        "header `x-compaction: bypass`, prevents this."
    )


def _print_pins(answer: object, *, as_json: bool) -> None:
    """Prints the pins that a response of the admin API lists, as JSON or as a table."""
    if as_json:
        print_json(answer)
    else:
        print_lines(format_pins(read_rows(answer, "pins"), get_terminal_width()))


def search(
    session: SessionArgument,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="WORDS…",
            help='Words to search for. Supports "exact phrases" and prefixes such as migrat*.',
        ),
    ],
    everywhere: Annotated[
        bool, typer.Option("--all", help="Search all conversations of the same tenant.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=50, help="Maximum number of results.")] = 20,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search the messages that compactions removed from a conversation. Prints the best match first."""
    client, _, path = _resolve_conversation(session, url, key_file, config)
    # The shell removes quotes around a phrase. An argument that has quotes of its own is left as it is.
    query = " ".join(f'"{word}"' if " " in word and '"' not in word else word for word in words)
    answer = client.get(f"{path}/search", q=query, limit=limit, scope="tenant" if everywhere else None)
    if as_json:
        print_json(answer)
        return
    hits = read_rows(answer, "hits")
    print_lines(format_hits(hits, get_terminal_width(), everywhere=everywhere))
    if not hits:
        raise typer.Exit(FAILED)


def format_conversations(rows: Iterable[JsonRow], max_cells: int | None) -> list[str]:
    """Formats a table with a line for each conversation.

    There is a column for labels, names or titles only if a conversation has one. There is a column `priced`
    only if the dollars of a conversation do not cover all its requests, and a column `failed` only if
    requests failed.

    The columns `last sent` and `last read` show the tokens of the last exchange, before and after compaction.

    Args:
        rows: The conversations, as the admin API returns them.
        max_cells: Largest width of a table, in terminal cells; see `format_table`.
    """
    rows = list(rows)
    shown = [name for name in _CAPTION_FIELDS if any(row.get(name) for row in rows)]
    failed = [Column("failed")] if any(_describe_failed(row) for row in rows) else []
    priced = ["priced"] if any(_describe_coverage("", row, "priced") for row in rows) else []
    cells = [
        [
            get_text(row, "id"),
            *(get_text(row, name) for name in shown),
            get_text(row, "model"),
            *(["".join(_describe_failed(row).values())] if failed else []),
            get_text(row, "status"),
            format_age(row.get("last_at") or None),
            format_count(row.get("requests")),
            format_count(row.get("rounds")),
            format_count(row.get("tokens_before")),
            format_count(row.get("tokens_after")),
            format_percent(row.get("cached_tokens"), row.get("prompt_tokens")),
            *(format_count(row.get(name)) for name in priced),
            format_dollars(row.get("cost_usd")),
            format_dollars(row.get("net_usd")),
        ]
        for row in rows
    ]
    columns = (
        _CONVERSATION_COLUMNS[0],
        *map(Column, shown),
        _CONVERSATION_COLUMNS[1],
        *failed,
        *_CONVERSATION_COLUMNS[2:-2],
        *(Column(name, is_right_aligned=True) for name in priced),
        *_CONVERSATION_COLUMNS[-2:],
    )
    return format_table(columns, cells, max_cells)


def format_conversation(
    record: JsonRow, last: JsonRow, rounds: Iterable[JsonRow], max_cells: int | None
) -> Iterator[str]:
    """Yields the lines that show one conversation: its figures, then its compactions and its pins.

    Args:
        record: The conversation, as the admin API returns it.
        last: The last exchange of the conversation, as the admin API returns it. Empty if there is none.
        rounds: The compactions of the conversation, as the admin API returns them.
        max_cells: Largest width of a table, in terminal cells; see `format_table`.
    """
    totals = _get_mapping(record, "totals")
    figures = {
        "id": get_text(record, "id"),
        "model": get_text(totals, "model"),
        **{name: get_text(totals, name) for name in _CAPTION_FIELDS if totals.get(name)},
        "last used": format_time(totals.get("last_at") or None),
        "requests": format_count(totals.get("requests")),
        **_describe_failed(totals),
        "last request": _describe_exchange_status(last, record.get("small_bytes")),
        "context now": _describe_context(last, totals, record.get("min_trigger")),
        "input tokens": format_count(totals.get("prompt_tokens")),
        "cached": format_percent(totals.get("cached_tokens"), totals.get("prompt_tokens")),
        "output tokens": format_count(totals.get("completion_tokens")),
        # The output has this line only if the model has searched the archive.
        **({"searches by the model": format_count(totals["recalls"])} if totals.get("recalls") else {}),
        **_describe_savings(record, totals),
        "user actions": "; ".join(_describe_directives(record)) or "none",
    }
    width = max(map(len, figures))
    yield from (f"{title:{width}}  {escape_unprintable(value)}" for title, value in figures.items())
    round_rows = [
        [
            get_text(row, "round"),
            format_time(row.get("at")),
            get_text(row, "strategy"),
            get_text(row, "reason"),
            format_count(row.get("messages")),
            format_count(row.get("tokens_before")),
            format_count(row.get("tokens_after")),
            format_dollars(row.get("cost_usd")),
            f"{count:.1f} {'request' if f'{count:.1f}' == '1.0' else 'requests'}"
            if isinstance(count := row.get("pays_back_after"), int | float)
            else UNKNOWN,
            _describe_round_state(row),
        ]
        for row in rounds
    ]
    if round_rows:
        yield ""
        yield from format_table(_ROUND_COLUMNS, round_rows, max_cells)
    pins = [each for each in record.get("pins") or () if isinstance(each, dict)]
    if pins:
        yield ""
        yield from format_pins(pins, max_cells)


def _describe_exchange_status(row: JsonRow, small_bytes: object) -> str:
    """Returns what the proxy did with an exchange; `n/a` if there is none.

    `small_bytes` is the size, in bytes, up to which a request passes unread now.
    """
    if not row:
        return UNKNOWN
    size_bytes, tokens, trigger = (row.get(name) for name in ("request_bytes", "tokens_after", "trigger"))
    is_sized = isinstance(tokens, int) and isinstance(trigger, int) and tokens < trigger
    if row.get("status") == "none" and not row.get("reason") and is_sized:
        return f"none, below the trigger of {format_count(trigger)} tokens"
    return describe_status(
        get_text(row, "status"),
        str(row.get("reason") or ""),
        size_bytes if isinstance(size_bytes, int) else None,
        small_bytes if isinstance(small_bytes, int) else None,
    )


def _describe_context(last: JsonRow, totals: JsonRow, min_trigger: object) -> str:
    """Returns the size of a conversation's last request and the size at which the conversation is compacted.

    The size is that of the last exchange if it is known, else of the latest request that the proxy read.
    """
    read = last if last.get("tokens_after") or last.get("prompt_tokens") else totals
    trigger = read.get("trigger") or min_trigger
    if read.get("tokens_after"):
        size = f"{format_count(read['tokens_after'])} tokens"
        size += f" of {format_count(read['window'])}" if read.get("window") else ""
    elif read is last:
        size = f"{format_count(last['prompt_tokens'])} tokens (counted by the provider)"
    else:
        size = UNKNOWN
    return f"{size}; compacts at {format_count(trigger)} tokens" if trigger else size


def _describe_savings(record: JsonRow, totals: JsonRow) -> dict[str, str]:
    """Returns the lines, by their titles, on what compaction has saved in a conversation."""
    tokens, money = _get_mapping(record, "tokens"), _get_mapping(record, "money")
    lines = {title: format_count(tokens.get(name)) for title, name in _SAVED_TOKENS_FIELDS}
    lines |= _describe_coverage("tokens of", totals, "counted")
    if money:
        lines |= {title: format_dollars(money.get(name)) for title, name in _MONEY_FIELDS}
        return lines | _describe_coverage("dollars of", totals, "priced")
    counts = (totals.get(name) for name in ("requests", "failed", "prompt_tokens"))
    reason = describe_missing_dollars(*counts, list_prices=record.get("list_prices") is not False)
    return {**lines, "net saved": f"{UNKNOWN}: {reason}"}


def _describe_coverage(title: str, totals: JsonRow, name: str) -> dict[str, str]:
    """Returns a line, by its title, on how many requests a sum covers; an empty result if it covers all.

    `name` is the field of the totals that counts the covered requests.
    """
    requests, covered = totals.get("requests"), totals.get(name)
    if not (isinstance(requests, int) and isinstance(covered, int) and 0 < covered < requests):
        return {}
    return {title: f"{covered:,} of {format_quantity(requests, 'request')}"}


def _describe_failed(totals: JsonRow) -> dict[str, str]:
    """Returns a line, by its title, on the requests that failed; an empty result if none did."""
    requests, failed = totals.get("requests"), totals.get("failed")
    if not (isinstance(requests, int) and isinstance(failed, int) and failed):
        return {}
    return {"failed": describe_failed_requests(failed, requests, str(totals.get("failure") or ""))}


def _describe_directives(record: JsonRow) -> Iterator[str]:
    """Yields a text for each instruction of a user that applies to a conversation, such as `bypass`.

    `record` is the conversation, as the admin API returns it.
    """
    if record.get("compact"):
        yield "the next request will be compacted"
    if record.get("bypass"):
        yield "bypass: requests are forwarded unchanged until `sessions resume`"
    if record.get("suppressed"):
        hard_tokens = record.get("hard_tokens")
        size = (
            f"about {format_count(hard_tokens)} tokens" if hard_tokens else "the hard mark (`hard_percent`)"
        )
        yield f"paused after an undo, until a request exceeds {size} or `sessions compact`"


def _describe_round_state(row: JsonRow) -> str:
    """Returns the state of a compaction. `row` is the compaction, as the admin API returns it."""
    used_at = row.get("used_at")
    return describe_round_state(
        get_text(row, "state"), float(used_at) if isinstance(used_at, int | float) else None
    )


def _get_mapping(row: JsonRow, name: str) -> JsonRow:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _format_exchange(row: JsonRow) -> list[str]:
    """Formats the cells of an exchange. `row` is the exchange, as the admin API returns it."""
    overhead_s = row.get("overhead_s")
    return [
        format_time(row.get("at")),
        _describe_exchange_status(row, None),
        " ".join([get_text(row, "code") if row.get("code") else "none", *_list_error(row)]),
        get_text(row, "model"),
        format_count(row.get("tokens_before")),
        format_count(row.get("tokens_after")),
        format_count(row.get("prompt_tokens")),
        format_count(row.get("cached_tokens")),
        format_count(row.get("completion_tokens")),
        format_milliseconds(overhead_s if isinstance(overhead_s, int | float) else None),
        format_dollars(_get_mapping(row, "saving").get("net")),
    ]


def _list_error(row: JsonRow) -> list[str]:
    return [get_text(row, "error")] if row.get("error") else []


def _format_event(row: JsonRow) -> list[str]:
    """Formats the cells of an event. `row` is the event, as the admin API returns it."""
    sizes = ("tokens_before", "tokens_after")
    return [
        format_time(row.get("at")),
        get_event_word(get_text(row, "kind"), row.get("outcome")),
        get_text(row, "strategy"),
        get_text(row, "round"),
        *(get_text(row, name) if row.get(name) is None else format_count(row[name]) for name in sizes),
        get_text(row, "cost_usd") if row.get("cost_usd") is None else format_dollars(row["cost_usd"]),
        get_text(row, "reason"),
    ]


def format_pins(pins: Iterable[JsonRow], max_cells: int | None) -> list[str]:
    """Formats a table with a line for each pin. Returns the line `no pins` if there are no pins."""
    rows = [[get_text(each, "id"), get_text(each, "text")] for each in pins]
    return format_table(_PIN_COLUMNS, rows, max_cells) if rows else ["no pins"]


def format_hits(hits: Iterable[JsonRow], max_cells: int | None, *, everywhere: bool = False) -> list[str]:
    """Formats a table with a line for each message that a search found, or the line `nothing found`.

    Args:
        hits: The messages, as the admin API returns them.
        max_cells: Largest width of a table, in terminal cells; see `format_table`.
        everywhere: Whether the search covered all conversations of a tenant. If so, each line names the
            conversation of the message.
    """
    rows = [
        [
            *([get_text(each, "conversation")] if everywhere else []),
            get_text(each, "message_id"),
            get_text(each, "turn"),
            get_text(each, "round"),
            get_text(each, "role"),
            " ".join(get_text(each, "snippet").split()),
        ]
        for each in hits
    ]
    columns = (Column("conversation"), *_HIT_COLUMNS) if everywhere else _HIT_COLUMNS
    return format_table(columns, rows, max_cells) if rows else ["nothing found"]
