"""Run by test_fuzzing.py as a program: atheris looks for bytes that our own readers do not expect.

Any exception but those that are said to be raised ends it with a traceback and a status of its own.
"""

# ruff: noqa: E501 - one case a line

import json
import resource
import sys
from contextlib import suppress
from pathlib import Path

import atheris  # type: ignore[import-untyped] # it has none

with atheris.instrument_imports(
    include=[
        "compaction_proxy.wires",
        "compaction_proxy.core",
        "compaction_proxy.gateway",
        "compaction_proxy.gateway.server.parser",
    ]
):
    from compaction_proxy.core.digest import canonicalize_arguments
    from compaction_proxy.core.errors import RequestRefusedError, UnreadableBodyError
    from compaction_proxy.core.token_rules import minify_json
    from compaction_proxy.gateway.control_headers import parse_control_headers
    from compaction_proxy.gateway.headers import to_client_headers, to_upstream_headers
    from compaction_proxy.gateway.identity import find_conversation_id
    from compaction_proxy.gateway.paths import find_deployment, is_own_path, join_upstream_url
    from compaction_proxy.gateway.server.parser import RequestHead, RequestParser
    from compaction_proxy.wires.body import parse_body as read_body
    from compaction_proxy.wires.chat.messages import PARSER
    from compaction_proxy.wires.chat.wire import CHAT
    from compaction_proxy.wires.context_errors import parse_overflow
    from compaction_proxy.wires.incremental_reader import IncrementalReader
    from compaction_proxy.wires.prescan import find_models, find_output_limits

READER = IncrementalReader(bytes(32), CHAT, max_beginnings=16)
SAID = b'{"role":"user","content":"h"}'
# What the process may allocate from the start to the end; it needs less than 100 MiB.
MOST_DATA_BYTES = 512 * 1024 * 1024


class Listener:
    """What a connection does with what is found: it looks at the head as the relay does."""

    def on_head_started(self) -> None:
        pass

    def on_head_received(self, head: RequestHead) -> None:
        try:
            parse_control_headers(head.fields)
            join_upstream_url("http://up/v1", head.raw_path, head.query)
        except RequestRefusedError:
            pass
        is_own_path(head.path)
        find_deployment(head.raw_path)
        find_conversation_id(head.fields, ["x-session-id"], b"secret", "tenant")
        for name, held in to_upstream_headers(head.fields, api_key="", hop_mark="0" * 16):
            assert not set(name + held) & {0, 10, 13}, (name, held)
        to_client_headers(200, head.fields)

    def on_body_received(self, piece: bytes) -> None:
        pass

    def on_request_received(self) -> None:
        pass


def read(data: bytes) -> None:
    """A body, all of it, and then as one that has grown."""
    find_models(data)
    find_output_limits(data)
    try:
        body = read_body(data, CHAT)
    except UnreadableBodyError:
        return
    assert READER.read(data, "t").messages == body.messages
    for raw in body.messages:
        with suppress(UnreadableBodyError):
            PARSER.parse_message(raw)
    grown = data[: body.messages_slice.stop - 1] + b"," + SAID + data[body.messages_slice.stop - 1 :]
    assert READER.read(grown, "t").messages == (*body.messages, SAID)


def answer(data: bytes) -> None:
    """What an upstream says."""
    for kind in ("application/json", "text/event-stream"):
        tap = CHAT.open_tap(kind, "gzip" if data[:2] == b"\x1f\x8b" else "")
        tap.feed(data)
        tap.result()
    parse_overflow(400, data, "")


def one(data: bytes) -> None:
    way, data = data[:1], data[1:]
    if way == b"H":
        RequestParser(Listener()).feed_data(data)
    elif way == b"A":
        answer(data)
    elif way == b"J":
        text = data.decode("utf-8", "surrogateescape")
        canonicalize_arguments(text)
        minify_json(text)
    else:
        read(data)


def corpus(folder: Path) -> None:
    """Something to begin with."""
    said = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a\ud83d"},
                {"type": "image_url", "image_url": {"url": "data:,"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a":1.0}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    whole = json.dumps({"model": "m", "max_tokens": 9, "tools": [{}], "messages": said}).encode()
    usage = b'data: {"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    head = b"POST /v1/chat/completions?a=b HTTP/1.1\r\nhost: a\r\nx-session-id: 1\r\nx-compaction: force\r\nconnection: te\r\n"
    seeds = [
        b"B" + whole, b"B" + b'{"messages":[' + SAID + b"]}", b"A" + usage, b"A" + whole, b'J{"a":[1.50,"b"]}',
        b'A{"error":{"message":"maximum context length is 8192 tokens, you requested 9000","code":"context_length_exceeded"}}',
        b"H" + head + b"content-length: 2\r\n\r\n{}", b"H" + head + b"transfer-encoding: chunked\r\nupgrade: h2c\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ]  # fmt: skip
    for number, seed in enumerate(seeds):
        (folder / str(number)).write_bytes(seed)


if __name__ == "__main__":
    corpus(Path(sys.argv[-1]))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA_BYTES, MOST_DATA_BYTES))
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
