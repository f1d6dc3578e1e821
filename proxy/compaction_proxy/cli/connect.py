"""`connect`: how a client is pointed at the proxy, printed or written into its configuration file."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compaction_proxy.cli.exit import BAD_CONFIG, FAILED, fail
from compaction_proxy.cli.options import ConfigOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from compaction_proxy.cli.client_config import LimitsOf
    from compaction_proxy.cli.clients import Client, TokenLimits

MODEL = "gpt-5.4"
BACKUP = ".before-compaction-proxy"
# Larger files are no client's configuration.
MAX_FILE_BYTES = 1_048_576


def connect(
    tool: Annotated[str | None, typer.Argument(metavar="[TOOL]", help="A client; --list names them.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the clients that are known.")] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Change its configuration file, with a backup.")
    ] = False,
    file: Annotated[Path | None, typer.Option(help="That file, where it is elsewhere.")] = None,
    model: Annotated[str, typer.Option(help="Model to name where one is needed.")] = MODEL,
    window: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="What the model takes; else as configured or known."),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Of the proxy.")] = None,
    config: ConfigOption = None,
) -> None:
    """Print how a client is pointed at the proxy, or do it."""
    from compaction_proxy.cli.clients import CLIENTS

    if list_ or tool is None:
        _list()
        return
    if tool not in CLIENTS:
        _unknown(tool)
    target = _target(url, config)
    limits_of = partial(_limits_of, window, config, url)
    if apply:
        _apply(tool, target, model, file, limits_of)
    else:
        _print(CLIENTS[tool], target, model, limits_of(model))


def _list() -> None:
    from compaction_proxy.cli.client_config import FILES
    from compaction_proxy.cli.clients import CLIENTS
    from compaction_proxy.cli.output import Column, say, table, width

    columns = (Column("tool"), Column("what it is"), Column("--apply"))
    rows = [
        (name, client.title, FILES[name].path if name in FILES else "-") for name, client in CLIENTS.items()
    ]
    say(table(columns, rows, width()))


def _unknown(tool: str) -> None:
    from difflib import get_close_matches

    from compaction_proxy.cli.clients import CLIENTS
    from compaction_proxy.cli.output import clean

    close = get_close_matches(tool, CLIENTS, n=1)
    meant = f", did you mean {close[0]!r}?" if close else "; `connect --list` names those that are known"
    fail(f"{clean(tool)!r}: no such client{meant}", BAD_CONFIG)


def _target(url: str | None, config: Path | None) -> str:
    """The proxy's base URL, with `/v1`."""
    import os

    from compaction_proxy.cli.admin_client import checked
    from compaction_proxy.cli.health import local_url
    from compaction_proxy.config.loader import load

    if url is None:
        server = load(config, os.environ).config.server
        if server.unix_socket is not None:
            fail("server.unix_socket is configured, which clients cannot use; give --url", BAD_CONFIG)
        url = local_url(server).removesuffix(server.base_path)
    if any(each in url for each in " \"'\\"):
        fail("--url: a base URL such as http://127.0.0.1:4141", BAD_CONFIG)
    return f"{checked(url)}/v1"


def _limits_of(window: int | None, config: Path | None, url: str | None, model: str) -> "TokenLimits":
    """What clients are told of a model: the window given, else the configured one, else the known one.

    What is configured here says nothing of a proxy that `url` names.
    """
    import os

    from compaction_proxy.cli.clients import TokenLimits
    from compaction_proxy.config.config import for_model
    from compaction_proxy.config.loader import load
    from compaction_proxy.providers.windows import known_window

    if window is None and url is None:
        window = for_model(load(config, os.environ).config, model).window
    return TokenLimits(window or known_window(model))


def _print(client: "Client", url: str, model: str, limits: "TokenLimits") -> None:
    from compaction_proxy.cli.clients import filled
    from compaction_proxy.cli.output import say

    say([f"# {client.title}: {client.where}", *filled(client.lines, url, model, limits).splitlines()])
    if client.note:
        say([f"# {filled(client.note, url, model, limits)}"])


def _apply(tool: str, url: str, model: str, file: Path | None, limits_of: "LimitsOf") -> None:
    """Show what changes, keep the old file beside the new one, and put that in place at once."""
    from compaction_proxy.cli.client_config import FILES, Refused

    if tool not in FILES:
        fail(f"{tool}: no file that could be changed; without --apply the lines are printed", BAD_CONFIG)
    path = (file or Path(FILES[tool].path)).expanduser().resolve()
    try:
        before = _standing(path).decode("utf-8") if path.exists() else ""
        made = _edited(before, lambda text: FILES[tool].edit(text, url, model, limits_of))
    except (Refused, UnicodeDecodeError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        fail(f"{path}: left alone: {why}", FAILED)
    except OSError as error:
        fail(f"{path}: cannot be read: {error.strerror}", FAILED)
    if made == before:
        print(f"{path}: is so already")
        return
    _show_changes(path, before, made)
    try:
        kept = _put(path, made)
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}", FAILED)
    print(f"{path}: written{f'; as it was: {kept}' if kept else ''}")


def _standing(path: Path) -> bytes:
    """What a file holds.

    Raises:
        Refused: It is no regular file, which may never end, or too large to be a configuration.
    """
    from compaction_proxy.cli.client_config import Refused

    if not path.is_file():
        raise Refused("it is no regular file")
    with path.open("rb") as file:
        found = file.read(MAX_FILE_BYTES + 1)
    if len(found) > MAX_FILE_BYTES:
        raise Refused(f"it is larger than {MAX_FILE_BYTES:,} bytes")
    return found


def _edited(before: str, edit: "Callable[[str], str]") -> str:
    """The new text, with the line ends of the old one."""
    if "\r\n" not in before:
        return edit(before)
    plain = before.replace("\r\n", "\n")
    made = edit(plain)
    return before if made == plain else made.replace("\n", "\r\n")


def _show_changes(path: Path, before: str, made: str) -> None:
    from difflib import unified_diff

    from compaction_proxy.cli.output import clean, say

    lines = unified_diff(before.splitlines(), made.splitlines(), str(path), str(path), n=1, lineterm="")
    say(clean(line) for line in lines)


def _put(path: Path, text: str) -> Path | None:
    """Replace a file at once; gives where the old one is kept, None if there was none."""
    import os
    import shutil
    import tempfile

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        kept = None
        if path.exists():
            shutil.copymode(path, name)
            kept = _backup(path)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    return kept


def _backup(path: Path) -> Path:
    """A copy of a file beside it, under a name that nothing has yet."""
    import shutil

    for number in range(1, 1_000):
        kept = path.with_name(f"{path.name}{BACKUP}{'' if number == 1 else f'-{number}'}")
        if not kept.exists():
            shutil.copy2(path, kept)
            return kept
    raise OSError(0, "too many backups stand beside it")
