"""Defines the command `watch`, which prints a line for each event of a running proxy."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from compaction_proxy.cli.admin_client import AdminClient, AdminUnreachableError, create_admin_client
from compaction_proxy.cli.console import (
    RED,
    ConfigOption,
    KeyOption,
    UrlOption,
    color_text,
    format_count,
    format_quantity,
    format_time,
    get_text,
    print_lines,
)
from compaction_proxy.core.event import FAILURE_KINDS, SMALL
from compaction_proxy.support.formatting import (
    describe_status,
    describe_upstream_cause,
    escape_unprintable,
    get_event_word,
)

# Seconds without data after which the connection counts as broken. A running proxy sends at least one line
# every 15 seconds.
SILENCE_LIMIT_S = 45.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
MAX_DATA_CHARACTERS = 1_048_576


class StreamMessage(NamedTuple):
    """One message of an event stream.

    Attributes:
        id: Id of the message, with which a new stream can continue after this message; empty if it has none.
        kind: `compaction`, `exchange`, `upstream`, or `lost` if the proxy left out messages because the
            client was too slow.
        data: The content, as JSON text.
    """

    id: str
    kind: str
    data: str


def watch(
    failures: Annotated[bool, typer.Option("--failures", help="Print failures only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON Lines.")] = False,
    url: UrlOption = None,
    key_file: KeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Print the events and exchanges of a running proxy as they happen, until interrupted."""

    def report_retry(reason: str) -> None:
        print(f"{reason}; retrying", file=sys.stderr)

    for message in follow_events(create_admin_client(url, key_file, config), report_retry):
        fields = _parse_fields(message.data)
        if failures and not _is_failure(message.kind, fields):
            continue
        if as_json:
            print(json.dumps({"id": message.id, "event": message.kind, "data": fields}))
        else:
            line = format_event_line(message.kind, fields)
            print_lines([color_text(line, RED, sys.stdout) if _is_failure(message.kind, fields) else line])
        sys.stdout.flush()


def follow_events(client: AdminClient, report_retry: Callable[[str], None]) -> Iterator[StreamMessage]:
    """Yields the messages of the proxy's event stream as they arrive. Never ends by itself.

    If the stream breaks or ends, connects again and continues after the last message that arrived.

    Args:
        client: The client of the admin API.
        report_retry: Called with the reason each time the connection fails after an earlier connection has
            worked.

    Raises:
        AdminRefusedError: If the proxy refuses the request. The function does not try again, because the
            proxy would refuse another request as well.
        AdminUnreachableError: If the proxy does not respond and has not responded before. If the proxy has
            responded before, the function tries again.
    """
    last_id, pause_s, has_connected = "", FIRST_PAUSE_S, False
    while True:
        headers = {"accept": "text/event-stream", **({"last-event-id": last_id} if last_id else {})}
        try:
            for message in _parse_messages(client.stream_lines("/events/stream", headers, SILENCE_LIMIT_S)):
                has_connected, pause_s = True, FIRST_PAUSE_S
                if message is not None:
                    last_id = message.id or last_id
                    yield message
            has_connected = True
        except AdminUnreachableError as error:
            if not has_connected:
                raise
            report_retry(str(error))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _parse_messages(lines: Iterator[str]) -> Iterator[StreamMessage | None]:
    """Parses the lines of an event stream into messages.

    Yields None for a heartbeat, which is a comment line that shows that the connection still works.
    """
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            yield None
        elif line:
            name, _, value = line.partition(":")
            joined = [fields["data"]] if name == "data" and "data" in fields else []
            fields[name] = "\n".join([*joined, value.removeprefix(" ")])[:MAX_DATA_CHARACTERS]
        else:
            if "data" in fields:
                message_id = fields.get("id", "")
                can_be_sent = message_id.isascii() and message_id.isprintable()  # in a header
                yield StreamMessage(
                    message_id if can_be_sent else "", fields.get("event", "message"), fields["data"]
                )
            fields = {}


def _parse_fields(data: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _is_failure(kind: str, fields: Mapping[str, Any]) -> bool:
    from compaction_proxy.core.exchange import FIRST_ERROR_STATUS

    if kind == "upstream":
        return True
    code = fields.get("code")
    failed = isinstance(code, int) and (code >= FIRST_ERROR_STATUS or code == 0)
    return fields.get("kind") in FAILURE_KINDS or (kind == "exchange" and failed)


def format_event_line(kind: str, fields: Mapping[str, Any]) -> str:
    """Formats an event or an exchange as a line: time, kind, conversation, sizes and further details.

    If `kind` is `lost`, the line gives only the number of messages that the proxy left out. If it is
    `upstream`, the line says which upstream has failed, why, and how often.
    """
    if kind == "lost":
        return f"{format_quantity(fields.get('lost'), 'message')} skipped: too many arrived at the same time"
    if kind == "upstream":
        return _format_upstream_line(fields)
    what = (
        get_event_word(get_text(fields, "kind"), fields.get("outcome"))
        if kind == "compaction"
        else _describe_exchange(fields)
    )
    sizes = f"{format_count(fields.get('tokens_before'))} → {format_count(fields.get('tokens_after'))}"
    names = [
        escape_unprintable(get_text(fields, name))
        for name in ("conversation", "asked" if kind == "compaction" else "model")
    ]
    parts = [
        format_time(fields.get("at"), "%H:%M:%S"),
        f"{escape_unprintable(kind):10}",
        f"{escape_unprintable(what):11}",
        *names,
    ]
    if "tokens_before" in fields:
        parts.append(sizes)
    overhead_s = fields.get("overhead_s")
    if isinstance(overhead_s, int | float):
        parts.append(f"overhead {overhead_s * 1000:.2f} ms")
    if kind == "exchange" and fields.get("code") == 0:
        parts.append("no response")
    for name, label in _EXTRA_FIELDS:
        value = fields.get(name)
        if value not in (None, "", 0, SMALL):
            shown = f"{value:.4g}" if isinstance(value, float) else escape_unprintable(value)
            parts.append(f"{label} {shown}")
    return "  ".join(parts)


def _describe_exchange(fields: Mapping[str, Any]) -> str:
    """Returns what the proxy did with a request; for one that was not inspected, with its size."""
    status, size_bytes = get_text(fields, "status"), fields.get("request_bytes")
    if fields.get("reason") != SMALL:
        return status  # the reason stands at the end of the line
    return describe_status(status, SMALL, size_bytes if isinstance(size_bytes, int) else None)


def _format_upstream_line(fields: Mapping[str, Any]) -> str:
    cause = get_text(fields, "cause")
    parts = [
        format_time(fields.get("at"), "%H:%M:%S"),
        f"{'upstream':10}",
        f"{'failed':11}",
        escape_unprintable(get_text(fields, "target")),
        escape_unprintable(f"{describe_upstream_cause(cause)} ({cause}){_describe_error(fields)}"),
    ]
    count = fields.get("count")
    if isinstance(count, int) and count > 1:
        parts.append(f"{format_count(count)} times")
    return "  ".join(parts)


def _describe_error(fields: Mapping[str, Any]) -> str:
    return f": {fields['error']}" if fields.get("error") else ""


# Fields that `format_event_line` puts at the end of a line, each with its label. The function leaves out a
# field that is missing, empty or 0.
_EXTRA_FIELDS = (
    ("strategy", "by"),
    ("round", "round"),
    ("code", "status"),
    ("error", "error"),
    ("cached_tokens", "cached"),
    ("recalls", "searches"),
    ("seconds", "took s"),
    ("cost_usd", "price $"),
    ("reason", "because"),
    ("request", "request"),
)
