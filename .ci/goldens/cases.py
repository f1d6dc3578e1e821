"""The cases: each starts processes of its own and records what they do."""

import gzip
import json
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from doubles import (
    HOST,
    PORT,
    SUMMARY_MODEL,
    Answer,
    Provider,
    Received,
    Reply,
    answer,
    find_wire,
    write_answer,
)
from golden_conversations import PATHS, WIRES, Conversation, Message, draw_conversation, write_request
from product import (
    ADMIN,
    KEY,
    LONG_STILL_S,
    Answered,
    Product,
    describe_answer,
    describe_request,
    run_product,
)
from recording import Recording

JSON_TYPE = ("content-type", "application/json")
STRATEGIES = ("anchored", "full", "selective", "split", "prune", "iterations", "chained")
# Triggers that conversations of this size reach.
FIELDS = {
    "full": {"tokens": 4_000},
    "selective": {"tokens": 3_000},
    "split": {"percent_of_window": 50},
    "prune": {"percent_of_window": 50, "keep_messages": 12},
    "iterations": {"tokens": 4_000},
    "chained": {"percent": 60, "keep_messages": 6},
}
WINDOW = 6_000
COMPACTING: dict[str, Any] = {
    "models": {"*": {"window": WINDOW}},
    "summary": {"model": SUMMARY_MODEL},
    # Rounds ahead of need run behind answers, and how long a request waits depends on the machine.
    "compaction": {"background": False, "max_block_s": 60},
}


@dataclass
class Run:
    """What all cases share.

    Attributes:
        recording: Where they go.
        provider: The provider.
        is_quick: Whether only a part is run.
    """

    recording: Recording
    provider: Provider
    is_quick: bool

    def count(self, number: int) -> int:
        """How many of so many conversations are played."""
        return max(2, number // 10) if self.is_quick else number


def make_small(wire: str, text: str = "Hello.", **members: Any) -> dict[str, Any]:
    """A small request."""
    body = json.loads(write_request(wire, [Message("system", "Be brief."), Message("user", text)]))
    del body["tools"]
    return {**body, **members}


def make_long(wire: str, number: int = 1, **members: Any) -> dict[str, Any]:
    """A request that is compacted."""
    conversation = draw_conversation(number)
    return {**json.loads(write_request(wire, conversation.messages)), **members}


def always(reply: Reply) -> Answer:
    """A provider that answers everything alike."""
    return lambda _: reply


# Conversations


def play_conversation(
    run: Run,
    product: Product,
    wire: str,
    conversation: Conversation,
    name: str,
    last: list[Callable[[], None]],
) -> None:
    """Play one conversation on one wire; its history is read once all are played."""
    clean = product.normalizer()
    responses: dict[str, Any] = {}
    forwarded: dict[str, Any] = {}
    headers = [
        # A tenant of its own: a summary model that fails is left alone for 30 s, by tenant.
        ("authorization", f"Bearer sk-golden-{wire}-{conversation.number}"),
        JSON_TYPE,
        *([("x-session-id", f"golden-{wire}-{conversation.number}")] if conversation.has_id else []),
    ]
    session = ""

    def ask(label: str, messages: list[Message], extra: list[tuple[str, str]]) -> None:
        nonlocal session
        body = write_request(
            wire, messages, is_streamed=conversation.is_streamed, has_blanks=conversation.has_blanks
        )
        found = product.ask(
            label,
            "POST",
            PATHS[wire],
            [*headers, *extra],
            body,
            normalizer=clean,
            into=(responses, forwarded),
        )
        session = found.header("x-compaction-session") or session

    for number, stop in enumerate(conversation.stops):
        messages = conversation.messages[:stop]
        ask(str(number), messages, conversation.actions.get(number, []))
        if number == conversation.branch and messages[-1].role == "user":
            edited = Message("user", messages[-1].text + " Take the shorter way.")
            ask(f"{number}, edited", [*messages[:-1], edited], [])
    for each in responses.values():
        each["body"] = "<the provider's>" if "Done as asked" in each["body"] else each["body"]

    def look() -> None:
        history: dict[str, Any] = {}
        paths = ["", "/exchanges", "/compactions", "/events"]
        if conversation.number % 4 == 0:
            paths += ["/search?q=commit%20port", "/export", "/instructions", "/pins"]
        for path in paths if session else []:
            found = product.request("GET", f"/admin/v1/conversations/{session}{path}", ADMIN)
            history[path] = describe_answer(found, clean, is_own=True)
        run.recording.add(name, {"responses": responses, "forwarded": forwarded, "history": history})

    last.append(look)


def record_conversations(run: Run, strategy: str) -> None:
    """40 conversations on three wires with one strategy, in one process."""
    fields = {strategy: FIELDS[strategy]} if strategy in FIELDS else {}
    compaction = {**COMPACTING["compaction"], "strategy": strategy, "strategies": fields}
    with run_product(run.provider, {**COMPACTING, "compaction": compaction}) as product:
        last: list[Callable[[], None]] = []
        for wire in WIRES:
            for number in range(run.count(40)):
                name = f"conversations/{strategy}/{wire}/{number:02}"
                play_conversation(run, product, wire, draw_conversation(number), name, last)
        product.settle_figures()
        for look in last:
            look()
        product.get_admin("stats", "stats?by=model")
        run.recording.add(f"conversations/{strategy}/process", product.finish())


# Relay


def record_relay(run: Run) -> None:
    """What is not touched: paths, headers, bodies, streams, failures of the provider; our own paths; bad HTTP."""
    replies = {
        "/v1/redirect": Reply(302, b"", (("location", "/v1/other"),)),
        "/v1/empty": Reply(204, b"", ()),
        "/v1/many": Reply(
            200,
            b"{}",
            (("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Odd-Case", "é".encode().decode("latin-1"))),
        ),
        "/v1/zipped": Reply(
            200, gzip.compress(b'{"a": 1}' * 50, mtime=0), (("content-encoding", "gzip"), JSON_TYPE)
        ),
        "/v1/stream": Reply(
            chunks=(b"data: 1\n\n", b"data: 2\n\n"), headers=(("content-type", "text/event-stream"),)
        ),
        "/v1/hop": Reply(
            200, b"{}", (("keep-alive", "timeout=5"), ("proxy-authenticate", "Basic"), ("te", "trailers"))
        ),
    }
    run.provider.answer = lambda request: replies.get(request.path) or answer(request)
    with run_product(run.provider) as product:
        for target in (
            "/v1/models",
            "/v1/models?a=1%20b&c=%2F",
            "/v1/../../x",
            "/v1/%2e%2e/%2e%2e/x",
            "//v1//models",
            "/other",
            "/",
            "/openapi.json",
            "/docs",
            *replies,
        ):
            product.ask(f"GET {target}", "GET", target, KEY)
        for method in ("HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "POST", "PROPFIND"):
            body = b"abc" if method in {"PUT", "PATCH", "POST"} else None
            product.ask(f"{method} /v1/files/1", method, "/v1/files/1", KEY, body)
        odd = [
            ("X-Odd", "1"),
            ("x-odd", "2"),
            ("Connection", "x-odd-hop"),
            ("X-Odd-Hop", "1"),
            ("TE", "trailers"),
            ("Via", "1.1 a"),
            ("X-Compaction-Unknown", "1"),
            ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),
        ]
        product.ask("odd headers", "GET", "/v1/models", [*odd, *KEY])
        product.ask(
            "binary",
            "POST",
            "/v1/audio/transcriptions",
            [*KEY, ("content-type", "application/octet-stream")],
            bytes(range(256)) * 8,
        )
        product.ask(
            "no id of the request",
            "POST",
            PATHS["chat"],
            [*KEY, JSON_TYPE],
            json.dumps(make_small("chat")).encode(),
            id_of_request=None,
        )
        for wire in WIRES:
            for streamed in (False, True):
                more: dict[str, Any] = {"stream": True} if streamed else {}
                product.post(f"{wire}, small, {streamed=}", PATHS[wire], make_small(wire, **more))
            product.post(f"{wire}, other prefix", f"/any/prefix{PATHS[wire]}?api-version=1", make_small(wire))
            product.ask(f"GET {wire}", "GET", PATHS[wire], KEY)
        product.post("azure", "/openai/deployments/gpt/chat/completions?api-version=2", make_small("chat"))
        for path in (
            "/livez",
            "/readyz",
            "/healthz",
            "/health",
            "/health/liveliness",
            "/health/liveness",
            "/health/readiness",
        ):
            product.ask(f"own {path}", "GET", path, is_own=True)
            product.ask(f"own POST {path}", "POST", path, (), b"{}", is_own=True)
        for path in (
            "/admin",
            "/admin/v1/conversations",
            "/admin/v1/none",
            "/ui",
            "/ui/none",
            "/mcp",
            "/v1/compact",
        ):
            product.ask(f"own {path}", "GET", path, is_own=True)
        upgrade = [
            ("connection", "upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA=="),
        ]
        product.ask("websocket", "GET", "/v1/responses", [*upgrade, *KEY])
        product.drop_connection()
        raw = {
            "no request": b"hello\r\n\r\n",
            "no host": b"GET /livez HTTP/1.1\r\nconnection: close\r\n\r\n",
            "http 1.0": b"GET /v1/models HTTP/1.0\r\n\r\n",
            "two lengths": b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
            "length and chunks": b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            "bad length": b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
            "bad chunk": b"POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            "chunks": b"POST /v1/x HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            "large header": b"GET /v1/x HTTP/1.1\r\nhost: a\r\nx-a: " + b"a" * 200_000 + b"\r\n\r\n",
            "space in a header": b"GET /v1/x HTTP/1.1\r\nhost: a\r\nx a: 1\r\n\r\n",
            "whole url": b"GET http://example.com/v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
            "connect": b"CONNECT example.com:443 HTTP/1.1\r\nhost: a\r\n\r\n",
            "expects": b"POST /v1/x HTTP/1.1\r\nhost: a\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc",
            "pipelined": b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\nGET /readyz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        }
        clean = product.normalizer()
        for name, data in raw.items():
            try:
                back = product.send_raw(data)
            except OSError:
                back = b"<reset>"
            product.responses[f"raw, {name}"] = clean.clean_body(back)
        run.recording.add("relay/untouched", product.finish())
    run.provider.answer = answer


def record_failures(run: Run) -> None:
    """Answers of the provider that are errors or broken, on each wire."""
    for wire in WIRES:
        error = json.dumps({"error": {"message": "No.", "type": "x", "code": "y"}}).encode()
        with run_product(run.provider, {"models": {"*": {"window": WINDOW}}}) as product:
            for status in (400, 401, 402, 403, 404, 409, 413, 422, 429, 500, 502, 503, 529):
                headers = (JSON_TYPE, ("retry-after", "7"), ("x-request-id", "up-1"))
                run.provider.answer = always(Reply(status, error, headers))
                product.post(f"status {status}", PATHS[wire], make_small(wire))
            broken = {
                "cut": Reply(200, b'{"id": 1', is_cut=True),
                "no json": Reply(200, b"<html>", (("content-type", "text/html"),)),
                "empty": Reply(200, b""),
                "wrong types": Reply(200, b'{"choices": 7, "usage": [], "output": {}, "content": 1}'),
                "zipped": Reply(
                    200,
                    gzip.compress(b'{"usage": {"prompt_tokens": 5}}', mtime=0),
                    (JSON_TYPE, ("content-encoding", "gzip")),
                ),
                "odd stream": Reply(
                    chunks=(b"data: {\n\n", b": x\n\n", b"data: [1]\n\n", b"event"),
                    headers=(("content-type", "text/event-stream"),),
                ),
            }
            for name, reply in broken.items():
                run.provider.answer = always(reply)
                product.drop_connection()
                product.post(name, PATHS[wire], make_small(wire, stream=name == "odd stream"))
            product.settle_figures()
            product.get_admin("failures", "upstream-failures")
            run.recording.add(f"failures/{wire}", product.finish())
    run.provider.answer = answer


def record_errors(run: Run) -> None:
    """Our own errors, on each wire: bad bodies, limits, keys, a provider that is away, slow or busy."""
    bodies = {
        "no json": b"{",
        "empty": b"",
        "array": b"[]",
        "text": b'"a"',
        "null": b"null",
        "not utf-8": b'{"model": "\xff"}',
        "two keys": b'{"model": "m", "messages": [], "messages": [], "input": [], "input": []}',
        "too deep": b"[" * 5_000,
        "blank": b" \n",
        "bom": b"\xef\xbb\xbf{}",
    }
    wrong: dict[str, dict[str, Any]] = {
        "messages is text": {"messages": "x", "input": 7},
        "messages is null": {"messages": None, "input": None},
        "message is text": {"messages": ["x"], "input": ["x"]},
        "no role": {"messages": [{"content": "x"}], "input": [{"content": "x"}]},
        "content is a number": {
            "messages": [{"role": "user", "content": 7}],
            "input": [{"role": "user", "content": 7}],
        },
        "model is a number": {"model": 7},
        "tools is text": {"tools": "x"},
        "max_tokens is text": {"max_tokens": "x"},
        "no members": {"messages": [], "input": []},
        "unknown role": {
            "messages": [{"role": "x", "content": "a"}],
            "input": [{"role": "x", "content": "a"}],
        },
        "stateful": {"previous_response_id": "resp_1", "thread_id": "t"},
        "provider compacts": {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        "n": {"n": 3},
        "huge max_tokens": {
            "max_tokens": 10_000_000,
            "max_output_tokens": 10_000_000,
            "max_completion_tokens": 10_000_000,
        },
    }
    gate_off = [("x-compaction-trigger-tokens", "1000")]
    for wire in WIRES:
        with run_product(run.provider, {"server": {"max_body_bytes": 20_000}, **COMPACTING}) as product:
            for name, body in bodies.items():
                product.post(f"body, {name}", PATHS[wire], body)
                product.post(f"body read, {name}", PATHS[wire], body, gate_off)
            for name, members in wrong.items():
                product.post(f"member, {name}", PATHS[wire], make_small(wire, **members), gate_off)
            small = json.dumps(make_small(wire)).encode()
            for value in ("x", "force, bypass", "FORCE", ""):
                product.post(f"x-compaction: {value!r}", PATHS[wire], small, [("x-compaction", value)])
            for name, value in (
                ("strategy", "none"),
                ("strategy", "prune"),
                ("trigger-tokens", "-1"),
                ("trigger-tokens", "1e9"),
                ("pin", ""),
                ("pin", "a" * 2_001),
                ("pin", "%C3%A9"),
            ):
                product.post(f"{name}: {value[:20]}", PATHS[wire], small, [(f"x-compaction-{name}", value)])
            product.post("request id is long", PATHS[wire], small, id_of_request="a" * 200)
            product.post("type is text", PATHS[wire], small, [("content-type", "text/plain")])
            for coding, data in {
                "gzip": gzip.compress(small, mtime=0),
                "deflate": zlib.compress(small),
                "br": b"xx",
                "none": small,
                "gzip, damaged": b"xx",
            }.items():
                product.post(
                    f"coding {coding}",
                    PATHS[wire],
                    data,
                    [("content-encoding", coding.partition(",")[0]), *gate_off],
                )
            product.drop_connection()
            product.post("too large", PATHS[wire], make_small(wire, "a" * 30_000))
            product.post(
                "too large once decoded",
                PATHS[wire],
                gzip.compress(json.dumps(make_small(wire, "a" * 30_000)).encode(), mtime=0),
                [("content-encoding", "gzip")],
            )
            product.post("hop", PATHS[wire], small, [("x-compaction-hop", "x")])
            run.recording.add(f"errors/{wire}/bodies", product.finish())
        with run_product(
            run.provider, {"server": {"client_keys": ["ck-1"]}, "upstream": {"api_key": "sk-upstream"}}
        ) as product:
            for value in ("Bearer ck-1", "Bearer ck-2", "Basic eA==", ""):
                product.ask(
                    f"authorization {value!r}",
                    "POST",
                    PATHS[wire],
                    [("authorization", value), JSON_TYPE],
                    small,
                )
            product.ask("no key", "POST", PATHS[wire], [JSON_TYPE], small)
            product.ask("x-api-key", "POST", PATHS[wire], [("x-api-key", "ck-1"), JSON_TYPE], small)
            product.ask("models", "GET", "/v1/models", [("authorization", "Bearer ck-1")])
            product.ask("models, no key", "GET", "/v1/models")
            product.ask(
                "origin",
                "POST",
                PATHS[wire],
                [("origin", "http://example.com"), ("authorization", "Bearer ck-1"), JSON_TYPE],
                small,
            )
            run.recording.add(f"errors/{wire}/keys", product.finish(with_metrics=False))
        with run_product(run.provider, upstream=f"http://{HOST}:9/v1") as product:
            product.post("small", PATHS[wire], small)
            product.post("streamed", PATHS[wire], make_small(wire, stream=True))
            product.ask("models", "GET", "/v1/models", KEY)
            product.settle_figures()
            product.get_admin("failures", "upstream-failures")
            product.ask("ready", "GET", "/readyz", is_own=True)
            run.recording.add(f"errors/{wire}/away", product.finish())
        _record_waiting(run, wire, small)


def _record_waiting(run: Run, wire: str, small: bytes) -> None:
    """A provider that says nothing for longer than it may; a proxy that serves one request at once."""
    held, released = threading.Event(), threading.Event()

    def hold(request: Received) -> Reply:
        held.set()
        released.wait(60)
        return answer(request)

    with run_product(run.provider, {"server": {"max_in_flight": 1}, "upstream": {"timeout_s": 1}}) as product:
        run.provider.answer = lambda request: (
            Reply(before=lambda: released.wait(5)) if find_wire(request.path) else answer(request)
        )
        product.post("timeout", PATHS[wire], small)
        released.set()
        product.settle(LONG_STILL_S)
        run.recording.add(f"errors/{wire}/timeout", product.finish(with_metrics=False))
    released.clear()
    run.provider.answer = hold
    with run_product(run.provider, {"server": {"max_in_flight": 1}}) as product:
        other = Product(product.proxy, run.provider)
        words = ("POST", PATHS[wire], [*KEY, JSON_TYPE], small)
        first = threading.Thread(target=other.request, args=words, kwargs={"is_settled": False})
        first.start()
        held.wait(60)
        for label, target in (("conversation", PATHS[wire]), ("elsewhere", "/v1/models"), ("ours", "/livez")):
            found = product.request("POST", target, [*KEY, JSON_TYPE], small, is_settled=False)
            product.responses[f"overload, {label}"] = describe_answer(found, product.normalizer())
        released.set()
        first.join()
        other.drop_connection()
        run.provider.answer = answer
        run.recording.add(f"errors/{wire}/overload", product.finish(with_metrics=False))


# What the proxy answers itself


def record_compact(run: Run) -> None:
    """Compaction as a call, on chat and on Responses; Codex's trigger and what it gets; counted tokens."""
    with run_product(run.provider, COMPACTING) as product:
        chat = make_long("chat")
        variants: dict[str, dict[str, Any]] = {
            "plain": {},
            "target": {"target_tokens": 1_500},
            "tiny target": {"target_tokens": 100},
            "trigger": {"trigger_tokens": 2_000},
            **{strategy: {"strategy": strategy, "trigger_tokens": 2_000} for strategy in STRATEGIES},
            "unknown strategy": {"strategy": "x"},
            "no model": {"model": None},
            "bad tokens": {"target_tokens": "x"},
            "negative": {"target_tokens": -1},
            "no messages": {"messages": None},
            "empty": {"messages": []},
            "messages is text": {"messages": "x"},
            "other members": {"stream": True, "temperature": 1},
        }
        for name, members in variants.items():
            body = {key: value for key, value in {**chat, **members}.items() if value is not None}
            product.post(f"compact, {name}", "/v1/compact", body, is_own=True)
        for name, data in {"no json": b"{", "array": b"[]", "empty": b""}.items():
            product.post(f"compact, body {name}", "/v1/compact", data, is_own=True)
        product.ask("compact, get", "GET", "/v1/compact", KEY, is_own=True)
        product.post("compact, coding", "/v1/compact", b"xx", [("content-encoding", "gzip")], is_own=True)
        product.post("compact, origin", "/v1/compact", chat, [("origin", "http://example.com")], is_own=True)
        for model in ("m", "claude-sonnet-4"):
            product.post(
                f"count_tokens, {model}", "/v1/messages/count_tokens", make_long("messages", model=model)
            )
            product.post(
                f"count_tokens, {model}, then asked", PATHS["messages"], make_long("messages", model=model)
            )
        run.recording.add("compact/calls", product.finish())

    for setting in ("auto", "answer", "relay"):
        for lacks in (True, False):
            run.provider.answer = _refuse_compaction if lacks else answer
            with run_product(
                run.provider, {**COMPACTING, "upstream": {"responses_compact": setting}}
            ) as product:
                _ask_for_items(product)
                run.recording.add(f"compact/responses, {setting}, {lacks=}", product.finish())
    run.provider.answer = answer


def _refuse_compaction(request: Received) -> Reply:
    """A provider that knows neither the path nor the items of compaction."""
    if request.path.endswith("/responses/compact"):
        return Reply(404, b'{"error": {"message": "Not found.", "type": "invalid_request_error"}}')
    if b"compaction_trigger" in request.body:
        text = "Invalid value: 'compaction_trigger'. Supported values are: 'message' and 'reasoning'."
        return Reply(
            400,
            json.dumps(
                {"error": {"message": text, "type": "invalid_request_error", "param": "input", "code": None}}
            ).encode(),
        )
    return answer(request)


def _ask_for_items(product: Product) -> None:
    body = make_long("responses")
    product.post("call", "/v1/responses/compact", body, is_own=True)
    product.post("call, small", "/v1/responses/compact", make_small("responses"), is_own=True)
    product.post(
        "call, stateful",
        "/v1/responses/compact",
        make_small("responses", previous_response_id="resp_1"),
        is_own=True,
    )
    product.post("call, no json", "/v1/responses/compact", b"{", is_own=True)
    product.post("call, wrong type", "/v1/responses/compact", {"model": "m", "input": 7}, is_own=True)
    trigger = {"type": "compaction_trigger"}
    for streamed in (True, False):
        asked = {**body, "input": [*body["input"], trigger], "stream": streamed}
        found = product.post(f"trigger, {streamed=}", PATHS["responses"], asked)
        items = _find_items(found)
        if items:
            user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}
            product.post(f"goes on, {streamed=}", PATHS["responses"], {**body, "input": [*items, user]})
            changed = [
                {**each, "encrypted_content": each["encrypted_content"][:-8] + "AAAAAAA="} for each in items
            ]
            product.post(f"altered, {streamed=}", PATHS["responses"], {**body, "input": [*changed, user]})
            data = json.dumps({**body, "input": [*items, user]}).encode()
            product.ask(
                f"another tenant, {streamed=}",
                "POST",
                PATHS["responses"],
                [("authorization", "Bearer sk-other"), JSON_TYPE],
                data,
            )


def _find_items(found: Answered) -> list[dict[str, Any]]:
    """The compaction items of an answer, streamed or not."""
    if found.status != 200:
        return []
    if found.header("content-type").startswith("application/json"):
        output = found.json().get("output", [])
    else:
        events = [
            json.loads(line[6:]) for line in found.body.decode().splitlines() if line.startswith("data: {")
        ]
        output = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    return [each for each in output if each.get("type") == "compaction"]


def record_recall(run: Run) -> None:
    """The model's own search on each wire, what the proxy places by itself, and agents over MCP."""
    fact = "the caretaker keeps the spare key under the blue flowerpot"
    filler = "The sun went down behind the hills and the shepherds drove their flocks home. " * 12
    talk = [Message("system", "Be brief.")]
    for number in range(30):
        told = fact if number == 2 else "nothing of note"
        talk += [Message("user", f"Read page {number}."), Message("assistant", f"{filler}{told}. {filler}")]
    # Finding something to place has little time, and the first search of a conversation indexes it. So a request
    # that asks for nothing comes first, and a search of ours.
    before = [*talk, Message("user", "Go on.")]
    asked = Message("user", "Where is the spare key with the flowerpot?")
    talk = [*before, Message("assistant", "There is no more."), asked]

    def search(request: Received) -> Reply:
        """A model that searches once, then answers."""
        body = request.read()
        if (
            not find_wire(request.path)
            or body.get("model") == SUMMARY_MODEL
            or b"memory_search" not in request.body
        ):
            return answer(request)
        if b"call_golden" in request.body:
            return write_answer(request, "It is under the flowerpot.", usage=1_000)
        return write_answer(
            request,
            "Let me look. ",
            [("call_golden", "memory_search", '{"query": "where is the spare key"}')],
            usage=1_000,
        )

    run.provider.answer = search
    config = {**COMPACTING, "models": {"*": {"window": WINDOW, "tools": True}}, "summary": {"model": "none"}}
    for wire in WIRES:
        with run_product(
            run.provider, {**config, "recall": {"tool": "inject", "auto": "inject", "auto_score": 0.1}}
        ) as product:
            session = ""

            def ask(
                label: str,
                messages: list[Message],
                *,
                streamed: bool = False,
                product: Product = product,
                wire: str = wire,
            ) -> str:
                name = f"recall-{label.partition(',')[0]}-{streamed}"
                own = [messages[0], Message("user", f"This is {name}."), *messages[1:]]  # a round of its own
                data = json.loads(write_request(wire, own, is_streamed=streamed))
                if label.startswith("auto"):
                    del data["tools"]
                named = [("x-session-id", name)]
                found = product.post(f"{label}, {streamed=}", PATHS[wire], data, named)
                return found.header("x-compaction-session")

            for label, streamed in (("tool", False), ("tool", True), ("auto", False)):
                session = ask(f"{label}, before", before, streamed=streamed)
                product.request("GET", f"/admin/v1/conversations/{session}/search?q=flowerpot", ADMIN)
                ask(label, talk, streamed=streamed)
            product.settle_figures()
            for query in ("spare%20key", "%22blue%20flowerpot%22", "shep*", "nothing-of-it", ""):
                for scope in ("", "&scope=tenant&limit=3"):
                    product.get_admin(
                        f"search {query}{scope}", f"conversations/{session}/search?q={query}{scope}"
                    )
            hits = product.request(
                "GET", f"/admin/v1/conversations/{session}/search?q=flowerpot", ADMIN
            ).json()
            first = _find_id(hits)
            product.get_admin("message", f"conversations/{session}/messages/{first}")
            product.get_admin("message, lines", f"conversations/{session}/messages/{first}?lines=1-1")
            calls: dict[str, dict[str, Any]] = {
                "initialize": {
                    "method": "initialize",
                    "params": {
                        "protocolVersion": "2025-06-18",
                        "capabilities": {},
                        "clientInfo": {"name": "golden", "version": "1"},
                    },
                },
                "list": {"method": "tools/list"},
                "search": {
                    "method": "tools/call",
                    "params": {"name": "memory_search", "arguments": {"query": "flowerpot"}},
                },
                "get": {"method": "tools/call", "params": {"name": "memory_get", "arguments": {"id": first}}},
                "status": {
                    "method": "tools/call",
                    "params": {"name": "conversation_status", "arguments": {"conversation": session}},
                },
                "compact": {
                    "method": "tools/call",
                    "params": {"name": "compact_now", "arguments": {"conversation": session}},
                },
                "none": {"method": "tools/call", "params": {"name": "none", "arguments": {}}},
                "other": {"method": "resources/list"},
            }
            for name, call in calls.items() if wire == "chat" else ():
                product.post(
                    f"mcp, {name}",
                    "/mcp",
                    {"jsonrpc": "2.0", "id": 1, **call},
                    [("accept", "application/json, text/event-stream")],
                    is_own=True,
                )
            run.recording.add(f"recall/{wire}", product.finish())
    run.provider.answer = answer


def _find_id(value: Any) -> str:
    """The first id of a message in an answer."""
    if isinstance(value, dict):
        found = [
            each for key, each in value.items() if key in {"id", "message"} and str(each).startswith("m_")
        ]
        found += [inner for each in value.values() if (inner := _find_id(each))]
        return found[0] if found else ""
    return next((inner for each in value if (inner := _find_id(each))), "") if isinstance(value, list) else ""


def record_overflow(run: Run) -> None:
    """A provider that refuses what is too long, in several words; a sum with `max_tokens` that it refuses."""
    wordings: dict[str, tuple[int, dict[str, Any]]] = {
        "openai": (
            400,
            {
                "error": {
                    "message": "This model's maximum context length is 4000 tokens. However, your messages resulted in {n} tokens. Please reduce the length of the messages.",
                    "type": "invalid_request_error",
                    "param": "messages",
                    "code": "context_length_exceeded",
                }
            },
        ),
        "anthropic": (
            400,
            {
                "type": "error",
                "error": {
                    "type": "invalid_request_error",
                    "message": "prompt is too long: {n} tokens > 4000 maximum",
                },
            },
        ),
        "unnumbered": (
            413,
            {
                "error": {
                    "message": "The request is too large for the context window.",
                    "type": "invalid_request_error",
                    "code": "context_length_exceeded",
                }
            },
        ),
        "llama": (
            500,
            {
                "error": {
                    "message": "the request exceeds the available context size. try increasing the context size",
                    "type": "exceed_context_size_error",
                    "n_ctx": 4_000,
                    "n_prompt_tokens": 9_000,
                }
            },
        ),
        "other": (400, {"error": {"message": "Your tools are not valid.", "type": "invalid_request_error"}}),
    }
    for wire in WIRES:
        for name, (status, error) in wordings.items():

            def refuse(request: Received, status: int = status, error: dict[str, Any] = error) -> Reply:
                tokens = len(request.body) // 4
                is_asked = find_wire(request.path) and request.read().get("model") != SUMMARY_MODEL
                if not is_asked or tokens <= 4_000:
                    return answer(request)
                return Reply(status, json.dumps(error).replace("{n}", str(tokens)).encode())

            run.provider.answer = refuse
            with run_product(run.provider, {**COMPACTING, "models": {"*": {"window": 30_000}}}) as product:
                conversation = draw_conversation(4)
                for number, stop in enumerate(conversation.stops):
                    body = write_request(wire, conversation.messages[:stop], is_streamed=number % 2 == 1)
                    product.ask(
                        str(number), "POST", PATHS[wire], [*KEY, JSON_TYPE, ("x-session-id", "over")], body
                    )
                product.settle_figures()
                product.get_admin("models", "models")
                run.recording.add(f"overflow/{wire}/{name}", product.finish(with_metrics=name == "openai"))

        def refuse_sum(request: Received) -> Reply:
            body = request.read()
            asked = next(
                (
                    body[key]
                    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens")
                    if key in body
                ),
                0,
            )
            tokens = len(request.body) // 4
            if not find_wire(request.path) or tokens + asked <= 8_000:
                return answer(request)
            text = f"This model's maximum context length is 8000 tokens. However, you requested {tokens + asked} tokens ({tokens} in the messages, {asked} in the completion). Please reduce the length of the messages or completion."
            return Reply(
                400,
                json.dumps(
                    {
                        "error": {
                            "message": text,
                            "type": "invalid_request_error",
                            "code": "context_length_exceeded",
                        }
                    }
                ).encode(),
            )

        run.provider.answer = refuse_sum
        with run_product(run.provider, COMPACTING | {"models": {"*": {"window": 8_000}}}) as product:
            for number in range(3):
                member = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}[
                    wire
                ]
                product.post(str(number), PATHS[wire], make_long(wire, 0, **{member: 6_000}))
            run.recording.add(f"overflow/{wire}/sum", product.finish())
    run.provider.answer = answer


def record_settings(run: Run) -> None:
    """Settings that change what is forwarded, each in a process of its own, on all wires."""
    compaction = COMPACTING["compaction"]
    model: dict[str, Any] = {"window": WINDOW}
    settings: dict[str, dict[str, Any]] = {
        "defaults": {"models": {"*": model}},
        "shadow": {"compaction": {**compaction, "mode": "shadow"}},
        "bypass": {"compaction": {**compaction, "mode": "bypass"}},
        "no summaries": {"summary": {"model": "none"}},
        "same, aligned": {"summary": {"model": "same", "input": "aligned"}},
        "instructions": {"summary": {"model": SUMMARY_MODEL, "instructions": "Write about ports."}},
        "full, own model": {
            "compaction": {**compaction, "strategy": "full", "strategies": {"full": {"tokens": 3_000}}},
            "summary": {},
        },
        "rows": {"compaction": {**compaction, "trigger": [{"messages": 12}, {"turns": 3, "tokens": 500}]}},
        "budgets": {
            "compaction": {
                **compaction,
                "target_tokens": 1_800,
                "keep": {"messages": 3, "tail_tokens": 400, "user_tokens": 300, "tool_results": 1},
            }
        },
        "role": {"compaction": {**compaction, "stand_in_role": "assistant"}},
        "probe": {"compaction": {**compaction, "recount": "probe"}},
        "characters": {"compaction": {**compaction, "counter": "characters"}},
        "alternation": {"models": {"*": {**model, "alternation": "strict"}}},
        "small window": {"models": {"*": {"window": 1_500}}},
        "prices": {"models": {"*": {**model, "prices": {"input": 1, "cached": 0.1, "output": 4}}}},
        "log for people": {"observability": {"log_format": "console"}},
        "base path": {"server": {"base_path": "/ours"}},
        "tenant of a header": {"session": {"tenant": "header:x-team"}},
        "no tenant, no hints": {"session": {"tenant": "none", "body_hints": False, "fallback": "none"}},
        "engine": {
            "upstream": {
                "engine": "native",
                "lower_max_tokens": False,
                "wires": {"messages": {"base_url": f"http://{HOST}:{PORT}/anthropic", "api_key": "sk-a"}},
            }
        },
    }
    for name, setting in settings.items():
        with run_product(run.provider, {**COMPACTING, **setting}) as product:
            for wire in WIRES:
                conversation = draw_conversation(11)
                for number, stop in enumerate(conversation.stops):
                    label = f"{wire} {number}"
                    headers = [*KEY, JSON_TYPE, ("x-session-id", f"s-{wire}"), ("x-team", "a")]
                    product.ask(
                        label, "POST", PATHS[wire], headers, write_request(wire, conversation.messages[:stop])
                    )
                    if name in {"defaults", "probe"}:
                        product.settle(LONG_STILL_S)  # rounds and probes run behind the answer
            run.recording.add(f"settings/{name}", product.finish(with_metrics=name in {"defaults", "prices"}))


def record_sessions(run: Run) -> None:
    """Which header or member names the conversation, and what is no part of one."""
    named = (
        "x-session-id",
        "x-litellm-session-id",
        "helicone-session-id",
        "x-dynamo-session-id",
        "x-bf-session-id",
        "x-claude-code-session-id",
        "x-opencode-session",
        "x-session-affinity",
        "x-openwebui-chat-id",
        "x-conversation-id",
        "x-chat-id",
        "x-coder-chat-id",
        "x-kilocode-taskid",
        "x-mux-workspace-id",
        "x-client-session-id",
        "x-interaction-id",
        "x-sm-conversation-id",
        "thread-id",
        "session-id",
        "session_id",
        "conversation_id",
        "x-litellm-trace-id",
        "x-portkey-trace-id",
    )
    members: dict[str, dict[str, Any]] = {
        "litellm_session_id": {"litellm_session_id": "b-1"},
        "session_id": {"metadata": {"session_id": "b-2"}},
        "conversation_id": {"metadata": {"conversation_id": "b-3"}},
        "thread_id": {"metadata": {"thread_id": "b-4"}},
        "chat_id": {"metadata": {"chat_id": "b-5"}},
        "user_id": {"metadata": {"user_id": "user_1_account_2_session_3f2504e0-4f89-41d3-9a0c-0305e82c3301"}},
        "client_metadata": {"client_metadata": {"thread_id": "b-6"}},
        "prompt_cache_key": {"prompt_cache_key": "abcdefghij0123456789"},
        "short key": {"prompt_cache_key": "app"},
        "title": {
            "messages": [
                {
                    "role": "user",
                    "content": "Generate a short title for this conversation. Answer with the title only.",
                }
            ]
        },
        "probe": {"max_tokens": 1},
    }
    with run_product(run.provider, COMPACTING) as product:
        clean = product.normalizer()  # one for all: equal ids stay equal
        for number, name in enumerate(named):
            for wire in WIRES:
                headers = [("x-compaction-trigger-tokens", "4000"), (name, f"s-{number}")]
                product.post(f"{name}, {wire}", PATHS[wire], make_small(wire), headers, normalizer=clean)
        baggage = [("x-compaction-trigger-tokens", "4000"), ("baggage", "session.id=s-b,x=1")]
        product.post("baggage", PATHS["chat"], make_small("chat"), baggage, normalizer=clean)
        product.post(
            "two",
            PATHS["chat"],
            make_small("chat"),
            [("x-chat-id", "s-1"), ("x-session-id", "s-2")],
            normalizer=clean,
        )
        product.post(
            "bad id", PATHS["chat"], make_small("chat"), [("x-session-id", "a" * 300)], normalizer=clean
        )
        agent = [
            ("x-claude-code-session-id", "s-1"),
            ("x-claude-code-agent-id", "a-1"),
            ("user-agent", "claude-cli/2.0"),
        ]
        product.post("agent", PATHS["messages"], make_small("messages"), agent, normalizer=clean)
        side = [*agent[:1], ("x-claude-code-request-class", "auxiliary")]
        product.post("auxiliary", PATHS["messages"], make_small("messages"), side, normalizer=clean)
        for name, more in members.items():
            for wire in WIRES:
                headers = [("x-compaction-trigger-tokens", "4000")]
                product.post(
                    f"{name} in {wire}", PATHS[wire], make_small(wire, **more), headers, normalizer=clean
                )
        for number, stop in enumerate((2, 5, 8)):
            for wire in WIRES:
                body = write_request(wire, draw_conversation(20).messages[:stop])
                product.post(
                    f"by content, {wire}, {number}",
                    PATHS[wire],
                    body,
                    [("x-compaction-trigger-tokens", "4000")],
                    normalizer=clean,
                )
        product.settle_figures()
        found = product.request("GET", "/admin/v1/conversations?limit=500", ADMIN)
        listed = (
            sorted(clean.clean(found.json())["conversations"], key=json.dumps) if found.status == 200 else []
        )
        product.responses["listed"] = listed
        run.recording.add("sessions/names", product.finish())


def record_admin(run: Run) -> None:
    """The admin API and the pages, about three conversations; steering them; its document."""
    with run_product(
        run.provider,
        {
            **COMPACTING,
            "models": {"*": {"window": WINDOW, "prices": {"input": 1, "cached": 0.1, "output": 4}}},
        },
    ) as product:
        clean = product.normalizer()
        ids = {}

        def play(wire: str, number: int, stop: int | None = None, label: str = "") -> None:
            messages = draw_conversation(number).messages
            found = product.post(
                f"{wire} {number} {label}",
                PATHS[wire],
                write_request(wire, messages[:stop]),
                [("x-session-id", f"a-{number}")],
                normalizer=clean,
            )
            ids[number] = found.header("x-compaction-session")

        for number, wire in ((1, "chat"), (2, "responses"), (4, "messages")):
            play(wire, number)
        product.settle_figures()
        one = ids[1]
        of_one = [
            "",
            "/exchanges",
            "/exchanges?limit=1",
            "/compactions",
            "/compactions/0",
            "/compactions/1",
            "/compactions/99",
            "/events",
            "/pins",
            "/instructions",
            "/search?q=port",
            "/export",
        ]
        everything = [
            "conversations",
            "conversations?limit=1",
            "conversations?q=m&sort=tokens",
            "conversations?sort=net",
            "conversations?sort=requests",
            "conversations?sort=x",
            "conversations?limit=-1",
            *(f"stats?by={by}" for by in ("total", "model", "key", "x")),
            "stats?since=7d&until=0m",
            "stats?since=x",
            "events",
            "events?limit=2",
            "events?failures=true",
            "upstream-failures",
            "models",
            "config",
            "export.json",
            "export.csv?of=exchanges",
            "export.csv?of=stats&by=model",
            "export.csv?of=x",
            "openapi.json",
            "none",
            "conversations/c_none",
            f"conversations/{one}/messages/m_none",
        ]
        for path in [*(f"conversations/{one}{each}" for each in of_one), *everything]:
            product.get_admin(f"GET {clean.clean_text(path)}", path, normalizer=clean)

        def do(method: str, path: str, body: Any = None, number: int = 0) -> None:
            data = None if body is None else json.dumps(body).encode()
            headers = [*ADMIN, *([JSON_TYPE] if data else [])]
            product.ask(
                f"{method} {clean.clean_text(path)} {json.dumps(body)[:40]} {number}",
                method,
                f"/admin/v1/{path}",
                headers,
                data,
                is_own=True,
                normalizer=clean,
            )

        base = f"conversations/{one}"
        do("POST", f"{base}/pins", {"text": "The port is 4141."})
        for text in ("", "a" * 2_001, 7):
            do("POST", f"{base}/pins", {"text": text})
        do("POST", f"{base}/pins", {})
        do("DELETE", f"{base}/pins/none")
        do("POST", f"{base}/bypass")
        play("chat", 1, label="bypassed")
        do("POST", f"{base}/resume")
        do("POST", f"{base}/compact")
        play("chat", 1, label="marked")
        for number in range(3):
            do("POST", f"{base}/undo", number=number)
        play("chat", 1, label="undone")
        do("POST", f"conversations/{ids[4]}/instructions/none")
        do("DELETE", f"conversations/{ids[4]}/instructions/none")
        do(
            "POST",
            "replay",
            {"messages": make_long("chat")["messages"], "model": "m", "strategies": ["anchored", "prune"]},
        )
        do("POST", "replay", {"conversation": one})
        do("POST", "replay", {})
        do("PUT", base)
        product.settle_figures()
        for path in (
            "",
            "/",
            "/conversations",
            f"/conversations/{one}",
            f"/conversations/{one}/compactions/0",
            f"/conversations/{one}/compactions/0/prompts",
            f"/conversations/{one}/search?q=port",
            "/failures",
            "/settings",
            "/playground",
            "/none",
        ):
            product.ask(f"page {clean.clean_text(path)}", "GET", f"/ui{path}", ADMIN, normalizer=clean)
        for name, headers in {
            "no key": [],
            "wrong key": [("authorization", "Bearer x")],
            "origin": [*ADMIN, ("origin", "http://example.com")],
            "fetch site": [*ADMIN, ("sec-fetch-site", "cross-site")],
        }.items():
            for path in ("/admin/v1/conversations", "/ui"):
                product.ask(f"{name} {path}", "GET", path, headers, is_own=True, normalizer=clean)
        do("DELETE", f"conversations/{ids[2]}")
        do("DELETE", f"conversations/{ids[4]}/tenant")
        do("DELETE", f"conversations/{ids[4]}", number=2)
        run.recording.add("admin/api", product.finish())


def record_background(run: Run) -> None:
    """Work ahead of need: each request waits until the process rests, so that the next finds what was made."""
    before = len(run.provider.received)
    with run_product(
        run.provider, {**COMPACTING, "compaction": {"max_block_s": 60}, "models": {"*": {"window": 9_000}}}
    ) as product:
        for wire in WIRES:
            conversation = draw_conversation(9)
            for number, stop in enumerate(conversation.stops):
                body = write_request(wire, conversation.messages[:stop])
                found = product.request(
                    "POST",
                    PATHS[wire],
                    [*KEY, JSON_TYPE, ("x-session-id", f"b-{wire}"), ("x-request-id", "golden-1")],
                    body,
                )
                product.responses[f"{wire} {number}"] = describe_answer(found, product.normalizer())
                product.settle(LONG_STILL_S)
        clean = product.normalizer()
        product.forwarded["all"] = [
            describe_request(each, clean, None) for each in run.provider.received[before:]
        ]
        run.recording.add("background/rounds", product.finish())
