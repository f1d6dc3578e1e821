"""`watch`: what happens in a running proxy, a line each, for as long as somebody looks."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from compaction_proxy.cli.options import ConfigOption, KeyOption, UrlOption

if TYPE_CHECKING:
    from compaction_proxy.cli.admin_client import AdminClient

# The server says something every 15 seconds.
SILENCE_S = 45.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
MAX_DATA_CHARACTERS = 1_048_576


class StreamMessage(NamedTuple):
    """One message of a stream of events.

    Attributes:
        id: Where to go on from.
        kind: `compaction`, `exchange`, or `lost`: what came too fast to be told.
        data: What it says; not decoded.
    """

    id: str
    kind: str
    data: str


def watch(
    failures: Annotated[bool, typer.Option("--failures", help="Only what went wrong.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line, for programs.")] = False,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Print what happens, live, until it is interrupted."""
    import sys

    from compaction_proxy.cli.admin_client import create_admin_client
    from compaction_proxy.cli.output import get_terminal_width, print_lines, truncate_text

    for told in follow_events(create_admin_client(url, key_file, config), _report_retry):
        fields = _parse_fields(told.data)
        if failures and not _is_failure(told.kind, fields):
            continue
        if as_json:
            print(json.dumps({"id": told.id, "event": told.kind, "data": fields}))
        else:
            print_lines([truncate_text(format_line(told.kind, fields), get_terminal_width())])
        sys.stdout.flush()


def _report_retry(why: str) -> None:
    import sys

    print(f"{why}; trying again", file=sys.stderr)


def follow_events(client: "AdminClient", report: Any) -> Iterator[StreamMessage]:  # noqa: ANN401 - called with a line
    """Messages without end: a stream that breaks is taken up where it broke.

    Raises:
        AdminRefused: The proxy refuses; asking again would not help.
        Unreachable: The first time nobody answered.
    """
    import time

    from compaction_proxy.cli.admin_client import AdminUnreachableError

    last, pause_s, heard = "", FIRST_PAUSE_S, False
    while True:
        headers = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
        try:
            for line in _parse_messages(client.stream_lines("/events/stream", headers, SILENCE_S)):
                heard, pause_s = True, FIRST_PAUSE_S
                if line is not None:
                    last = line.id or last
                    yield line
            heard = True
        except AdminUnreachableError as error:
            if not heard:
                raise
            report(str(error))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _parse_messages(lines: Iterator[str]) -> Iterator[StreamMessage | None]:
    """The messages in a stream's lines; None for a sign of life."""
    told: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            yield None
        elif line:
            name, _, value = line.partition(":")
            joined = [told["data"]] if name == "data" and "data" in told else []
            told[name] = "\n".join([*joined, value.removeprefix(" ")])[:MAX_DATA_CHARACTERS]
        else:
            if "data" in told:
                yield StreamMessage(
                    _sanitize_id(told.get("id", "")), told.get("event", "message"), told["data"]
                )
            told = {}


def _sanitize_id(text: str) -> str:
    """An id that may be sent back in a header's value."""
    return text if text.isascii() and text.isprintable() else ""


def _parse_fields(data: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _is_failure(kind: str, fields: Mapping[str, Any]) -> bool:
    from compaction_proxy.core.event import FAILURES
    from compaction_proxy.core.exchange import FIRST_ERROR_STATUS

    code = fields.get("code")
    failed = isinstance(code, int) and (code >= FIRST_ERROR_STATUS or code == 0)
    return fields.get("kind") in FAILURES or (kind == "exchange" and failed)


def format_line(kind: str, fields: Mapping[str, Any]) -> str:
    """An event or an exchange in one line: when, what, whose, how large before and after, and why."""
    from compaction_proxy.cli.output import escape_unprintable, format_count, format_time, get_text

    if kind == "lost":
        return f"{format_count(fields.get('lost'))} more came too fast to be told"
    what = get_text(fields, "kind") if kind == "compaction" else get_text(fields, "status")
    sizes = f"{format_count(fields.get('tokens_before'))} → {format_count(fields.get('tokens_after'))}"
    named = [
        escape_unprintable(get_text(fields, name))
        for name in ("conversation", "asked" if kind == "compaction" else "model")
    ]
    parts = [
        format_time(fields.get("at"), "%H:%M:%S"),
        f"{escape_unprintable(kind):10}",
        f"{escape_unprintable(what):11}",
        *named,
    ]
    if "tokens_before" in fields:
        parts.append(sizes)
    overhead_s = fields.get("overhead_s")
    if isinstance(overhead_s, int | float):
        parts.append(f"overhead {overhead_s * 1000:.2f} ms")
    parts += [
        f"{label} {_format_short(fields[name])}"
        for name, label in _EXTRAS
        if fields.get(name) not in (None, "", 0)
    ]
    return "  ".join(parts)


# What else is told where it is known, and what stands before it.
_EXTRAS = (
    ("strategy", "by"),
    ("round", "round"),
    ("code", "status"),
    ("cached_tokens", "cached"),
    ("recalls", "searches"),
    ("seconds", "took s"),
    ("cost_usd", "cost $"),
    ("reason", "because"),
    ("request", "request"),
)


def _format_short(value: object) -> str:
    from compaction_proxy.cli.output import escape_unprintable

    return f"{value:.4g}" if isinstance(value, float) else escape_unprintable(value)
