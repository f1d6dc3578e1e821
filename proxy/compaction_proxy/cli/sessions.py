"""Holds the commands `sessions` and `search`, which show and steer the conversations of a running proxy."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compaction_proxy.cli.exit import BAD_CONFIG, FAILED, create_group, exit_with_error
from compaction_proxy.cli.options import ConfigOption, JsonOption, KeyOption, SessionArgument, UrlOption

if TYPE_CHECKING:
    from compaction_proxy.cli.admin_client import AdminClient

sessions_app = create_group("Look at the conversations of a running proxy, and steer them.")
ORDERS = ("last", "tokens", "net", "requests")
MAX_LISTED = 1_000


def _resolve_conversation(
    session: str, url: str | None, key_file: Path | None, config: Path | None
) -> "tuple[AdminClient, str, str]":
    """Returns a client of the admin API, the conversation's id and the conversation's path in that API."""
    from compaction_proxy.cli.admin_client import create_admin_client, quote_segment

    client = create_admin_client(url, key_file, config)
    conversation_id = client.find_conversation_id(session)
    return client, conversation_id, f"/conversations/{quote_segment(conversation_id)}"


@sessions_app.command("list")
def list_conversations(
    sort: Annotated[str, typer.Option(help=f"By what, largest first: {', '.join(ORDERS)}.")] = "last",
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="How many at most.")] = 50,
    search: Annotated[str | None, typer.Option(help="Part of an id or of a model's name.")] = None,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List conversations, last used first."""
    from compaction_proxy.cli.admin_client import create_admin_client, read_rows
    from compaction_proxy.cli.output import get_terminal_width, print_json, print_lines
    from compaction_proxy.cli.session_texts import format_conversations

    if sort not in ORDERS:
        exit_with_error(f"--sort: one of {', '.join(ORDERS)}", BAD_CONFIG)
    answer = create_admin_client(url, key_file, config).get(
        "/conversations", limit=limit, sort=sort, q=search
    )
    if as_json:
        print_json(answer)
    else:
        print_lines(format_conversations(read_rows(answer, "conversations"), get_terminal_width()))


@sessions_app.command()
def show(
    session: SessionArgument,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a conversation: what it has used, what was saved, its rounds and its pins."""
    from compaction_proxy.cli.admin_client import read_rows
    from compaction_proxy.cli.output import get_terminal_width, print_json, print_lines
    from compaction_proxy.cli.session_texts import format_conversation

    client, _, path = _resolve_conversation(session, url, key_file, config)
    record = client.get(path)
    rounds = read_rows(client.get(f"{path}/compactions"), "compactions")
    if as_json:
        print_json({"conversation": record, "compactions": rounds})
    else:
        print_lines(
            format_conversation(record if isinstance(record, dict) else {}, rounds, get_terminal_width())
        )


@sessions_app.command()
def compact(
    session: SessionArgument, url: UrlOption = None, key_file: KeyOption = None, config: ConfigOption = None
) -> None:
    """Have a conversation's next request compacted."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    client.send("POST", f"{path}/compact")
    print(f"{name}: its next request is compacted")


@sessions_app.command()
def undo(
    session: SessionArgument, url: UrlOption = None, key_file: KeyOption = None, config: ConfigOption = None
) -> None:
    """Take a conversation's newest round back."""
    from compaction_proxy.cli.output import escape_unprintable

    client, name, path = _resolve_conversation(session, url, key_file, config)
    answer = client.send("POST", f"{path}/undo")
    number = escape_unprintable(answer.get("round")) if isinstance(answer, dict) else "?"
    print(f"{name}: round {number} is not applied any more")


@sessions_app.command()
def pin(
    session: SessionArgument,
    text: Annotated[str, typer.Argument(help="What no round may lose: one line, up to 2,000 characters.")],
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Pin a text to a conversation."""
    from compaction_proxy.cli.admin_client import read_rows
    from compaction_proxy.cli.output import get_terminal_width, print_lines
    from compaction_proxy.cli.session_texts import format_pins

    client, _, path = _resolve_conversation(session, url, key_file, config)
    print_lines(
        format_pins(
            read_rows(client.send("POST", f"{path}/pins", {"text": text}), "pins"), get_terminal_width()
        )
    )


@sessions_app.command()
def unpin(
    session: SessionArgument,
    pin_id: Annotated[str, typer.Argument(metavar="PIN", help="Its id, as `sessions show` has it.")],
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Let go of a pinned text."""
    from compaction_proxy.cli.admin_client import quote_segment, read_rows
    from compaction_proxy.cli.output import get_terminal_width, print_lines
    from compaction_proxy.cli.session_texts import format_pins

    client, _, path = _resolve_conversation(session, url, key_file, config)
    answer = client.send("DELETE", f"{path}/pins/{quote_segment(pin_id)}")
    print_lines(format_pins(read_rows(answer, "pins"), get_terminal_width()))


@sessions_app.command()
def bypass(
    session: SessionArgument, url: UrlOption = None, key_file: KeyOption = None, config: ConfigOption = None
) -> None:
    """Let a conversation's requests go on as they come, until it is resumed."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    client.send("POST", f"{path}/bypass")
    print(f"{name}: its requests go on as they come; `sessions resume {name}` ends that")


@sessions_app.command()
def resume(
    session: SessionArgument, url: UrlOption = None, key_file: KeyOption = None, config: ConfigOption = None
) -> None:
    """Compact a conversation's requests again."""
    client, name, path = _resolve_conversation(session, url, key_file, config)
    client.send("POST", f"{path}/resume")
    print(f"{name}: its requests are compacted again")


@sessions_app.command()
def export(
    session: SessionArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="A new file; default: the terminal.")
    ] = None,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Write everything that is kept of a conversation as JSON. It holds the conversation's text."""
    from compaction_proxy.cli.output import print_json

    client, name, path = _resolve_conversation(session, url, key_file, config)
    record = client.get(f"{path}/export")
    if output is None:
        print_json(record)
        return
    _write_export(output, record)
    print(f"{name}: written to {output}")


def _write_export(path: Path, export: Any) -> None:  # noqa: ANN401 - JSON
    """Writes the export to a new file that only its owner can read."""
    import json
    import os

    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(export, file, indent=2)
            file.write("\n")
    except FileExistsError:
        exit_with_error(f"{path}: exists already, and is left alone", FAILED)
    except OSError as error:
        exit_with_error(f"{path}: cannot be written: {error.strerror}", FAILED)


@sessions_app.command()
def delete(
    session: SessionArgument,
    tenant: Annotated[bool, typer.Option("--tenant", help="All conversations of its tenant, too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Delete everything that is kept of a conversation."""
    from compaction_proxy.cli.output import format_count

    client, name, path = _resolve_conversation(session, url, key_file, config)
    target = f"all conversations of the tenant of {name}" if tenant else name
    if not yes and not typer.confirm(f"Delete what is kept of {target}?"):
        exit_with_error("nothing deleted", FAILED)
    answer = client.send("DELETE", f"{path}/tenant" if tenant else path)
    number = answer.get("deleted") if isinstance(answer, dict) else None
    print(f"{name}: {format_count(number)} records deleted")


def search(
    session: SessionArgument,
    words: Annotated[
        list[str], typer.Argument(metavar="WORDS…", help="What to look for; a phrase in quotes, begin*.")
    ],
    everywhere: Annotated[
        bool, typer.Option("--all", help="In all conversations of the tenant that ID belongs to.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=50, help="How many at most.")] = 20,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find messages that rounds have taken out of a conversation, the best first."""
    from compaction_proxy.cli.admin_client import read_rows
    from compaction_proxy.cli.output import get_terminal_width, print_json, print_lines
    from compaction_proxy.cli.session_texts import format_hits

    client, _, path = _resolve_conversation(session, url, key_file, config)
    query = " ".join(f'"{word}"' if " " in word else word for word in words)
    answer = client.get(f"{path}/search", q=query, limit=limit, scope="tenant" if everywhere else None)
    if as_json:
        print_json(answer)
        return
    hits = read_rows(answer, "hits")
    print_lines(format_hits(hits, get_terminal_width(), everywhere=everywhere))
    if not hits:
        raise typer.Exit(FAILED)
