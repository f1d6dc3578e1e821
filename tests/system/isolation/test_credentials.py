"""A key that is shown anywhere stands nowhere afterwards: no line, no store key, no answer but its owner's.

The keys look like nothing that a filter of ours knows, so that nothing but care keeps them out.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.storage.envelope import extract_json
from tests.helpers.proxy_processes import command
from tests.helpers.redis_servers import RedisServer

CHAT = "/v1/chat/completions"
ADMIN = "/admin/v1/conversations"
SUMMARY_MODEL = "summary-small"
# One for each place in which a key may be; the places are in the names of the requests below.
KEYS = {
    name: f"{number}f00ba4{number}c0ffee{number}"
    for number, name in enumerate(
        ("authorization", "x-api-key", "api-key", "x-goog-api-key", "query", "body", "malformed", "admin",
         "upstream-error", "redis", "session", "cookie", "secret", "summary", "path"), start=21
    )
}  # fmt: skip


def long_talk(key: str) -> list[dict[str, str]]:
    said = [{"role": role, "content": f"{role} {n} says alpha beta gamma delta " * 8} for n in range(10)
            for role in ("user", "assistant")]  # fmt: skip
    return [*said, {"role": "user", "content": f"My key is {key}."}]


class Troubled:
    """An upstream that fails in the way that a request names in `user`, and repeats the keys it was shown."""

    def __init__(self, isolation: Any) -> None:
        self._isolation = isolation

    async def __call__(self, asked: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(asked.body) if asked.body[:1] == b"{" and asked.body[-1:] == b"}" else {}
        told = json.dumps(
            {"error": {"message": f"Incorrect API key: {KEYS['upstream-error']} {asked.fields}"}}
        )
        trouble = body.get("user", "")
        if body.get("model") == SUMMARY_MODEL or trouble == "refused":
            writer.write(self._isolation.answer(b"401 Unauthorized", told.encode()))
        elif trouble == "overflow":
            said = {"message": f"maximum context length is 900 tokens {KEYS['upstream-error']}",
                    "code": "context_length_exceeded"}  # fmt: skip
            writer.write(self._isolation.answer(b"400 Bad", json.dumps({"error": said}).encode()))
        elif trouble == "cut":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + KEYS["upstream-error"].encode())
            writer.close()
        elif trouble == "reset":
            writer.transport.abort()
        elif trouble == "garbage":
            writer.write(b"NONSENSE " + KEYS["upstream-error"].encode() + b"\r\n\r\n")
            writer.close()
        elif trouble == "stream":
            event = b'data: {"error":{"message":"%b"}}\n\n' % KEYS["upstream-error"].encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(event) + event)
        else:
            writer.write(self._isolation.answer(b"200 OK", b'{"choices":[],"usage":{"prompt_tokens":9}}'))


TROUBLES = ("refused", "overflow", "cut", "reset", "garbage", "stream", "none")


def requests(isolation: Any) -> list[bytes]:
    """Keys in every place, with every trouble behind; and requests of which nothing can be made."""
    fields = [
        f"authorization: Bearer {KEYS['authorization']}", f"x-api-key: {KEYS['x-api-key']}",
        f"api-key: {KEYS['api-key']}", f"x-goog-api-key: {KEYS['x-goog-api-key']}",
        f"x-session-id: {KEYS['session']}", f"cookie: key={KEYS['cookie']}",
    ]  # fmt: skip
    made = []
    target = f"{CHAT}?api_key={KEYS['query']}"
    for trouble in TROUBLES:
        for model, messages in (("small", long_talk(KEYS["body"])), ("m", long_talk(KEYS["body"])[-1:])):
            body = {"model": model, "user": trouble, "api_key": KEYS["body"], "messages": messages}
            made += [
                isolation.request("POST", target, *shown, body=json.dumps(body).encode())
                for shown in ((fields[0], *fields[4:]), fields[1:], fields)
            ]
    cut = json.dumps({"model": "small", "api_key": KEYS["body"], "messages": long_talk(KEYS["body"])})[:-3]
    made.append(isolation.request("POST", target, *fields, body=cut.encode()))
    made.append(isolation.request("POST", target, *fields, body=b"\xff\xfe" + KEYS["body"].encode() * 900))
    made.append(isolation.request("POST", target, *fields, "content-encoding: gzip", body=cut.encode()))
    made.append(
        isolation.request("POST", target, *fields, "x-compaction: " + KEYS["malformed"], body=cut.encode())
    )
    made.append(isolation.request("GET", f"/v1/models/{KEYS['path']}?key={KEYS['query']}", *fields))
    made.append(isolation.request("GET", f"/../{KEYS['path']}?key={KEYS['query']}", *fields))
    made.append(isolation.request("POST", f"/v1/files?key={KEYS['query']}", *fields, body=b"x" * 99))
    made.append(isolation.request("GET", "/v1/models", *fields, "upgrade: websocket", "connection: upgrade"))
    made += [
        f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{field}\r\n\r\n".encode("latin-1")
        for field in (
            f"authorization Bearer {KEYS['malformed']}", f"authorization: Bearer {KEYS['malformed']}\x00",
            f"auth\x01orization: {KEYS['malformed']}", f"authorization: {KEYS['malformed'] * 4_000}",
            f"content-length: {KEYS['malformed']}", f"transfer-encoding: {KEYS['malformed']}",
            f"host: {KEYS['malformed']}", f" folded {KEYS['malformed']}",
        )
    ]  # fmt: skip
    made.append(f"{KEYS['malformed']}\r\n\r\n".encode())
    made.append(f"GET /{KEYS['malformed']} HTTP/9.9\r\n\r\n".encode())
    made += [
        isolation.request(method, path, f"authorization: Bearer {KEYS['malformed']}", body=b"{")
        for method in ("GET", "POST", "DELETE")
        for path in (
            f"{ADMIN}/{KEYS['malformed']}",
            f"{ADMIN}/c_x/pins/{KEYS['malformed']}",
            "/metrics",
            "/ui",
        )
    ]
    return made


def found(data: bytes) -> list[str]:
    return [name for name, key in KEYS.items() if key.encode() in data]


async def admin_answers(isolation: Any, port: int, names: set[str]) -> bytes:
    told = b""
    for name in names:
        for path in (f"{ADMIN}/{name}", f"{ADMIN}/{name}/events", f"{ADMIN}/{name}/nothing", "/readyz"):
            reply = await isolation.ask(
                port, isolation.request("GET", path, f"authorization: Bearer {KEYS['admin']}")
            )
            assert reply is not None
            told += reply.head + reply.body
    return told


async def test_a_key_stands_in_no_line_no_store_and_no_answer_of_ours(isolation: Any) -> None:
    names: set[str] = set()
    with RedisServer(isolation.folder, "--requirepass", KEYS["redis"]) as server:
        url = f"redis://:{KEYS['redis']}@127.0.0.1:{server.port}/0"
        async with (
            isolation.upstream(Troubled(isolation)) as upstream,
            isolation.proxies(
                1,
                upstream__base_url=f"{upstream.url}/v1",
                store__url=url,
                server__admin_key=KEYS["admin"],
                server__secret=KEYS["secret"],
                summary__model=SUMMARY_MODEL,
                summary__api_key=KEYS["summary"],
                models=json.dumps({"small": {"window": 1_200}, "m": {"window": 100_000}}),
            ) as (proxy,),
        ):
            replies = []
            for raw in requests(isolation):
                reply = await isolation.ask(proxy.port, raw)
                replies.append(reply)
                if reply is not None:
                    names.add(reply.field("x-compaction-session"))
            told = await admin_answers(isolation, proxy.port, names - {""})
            values = isolation.stored(url)
            server.kill()
            replies += [await isolation.ask(proxy.port, raw) for raw in requests(isolation)[:6]]
            async with asyncio.timeout(100):
                while b"store.failed" not in proxy.output.read_bytes():  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.05)
            calls = [each for each in upstream.seen if SUMMARY_MODEL.encode() in each.body]
        output = proxy.output.read_bytes()

    keys = b"\n".join(values)
    held = b"\n".join(extract_json(value) or value for each in values.values() for value in each)
    refused = b"".join(each.body for each in replies if each is not None and each.status in {401, 431, 501})
    # What a user wrote into a message is that message's text. It is kept, and found in no line all the same.
    assert (found(output), found(keys), found(told)) == ([], [], [])
    assert set(found(held)) <= {"body"}
    assert set(found(refused)) <= {"upstream-error"} | set(KEYS) - {"malformed", "admin", "redis", "secret"}
    assert calls
    assert b"compaction.failed" in output
    assert len(values) > 5


@pytest.mark.parametrize(
    "name",
    ["UPSTREAM__BASE_URL", "SUMMARY__BASE_URL", "STORE__URL", "SERVER__CLIENT_KEYS",
     "STORE__ENCRYPTION_KEYS", "UPSTREAM__API_KEY", "SERVER__ADMIN_KEY"],
)  # fmt: skip
def test_a_key_in_a_setting_that_is_refused_is_not_repeated(name: str, tmp_path: Path) -> None:
    key = KEYS["authorization"]
    value = {"SERVER__CLIENT_KEYS": f'["{key}", ""]', "STORE__ENCRYPTION_KEYS": f'["{key}"]'}.get(
        name, f"http://{key}:{key}@127.0.0.1:9/v1 \x7f"
    )
    environ = {f"COMPACTION_PROXY__{name}": value}
    code, printed, errors = command("serve --port 0", tmp_path, **environ)
    assert code == 2, errors
    assert key not in printed + errors
