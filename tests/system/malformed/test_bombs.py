"""Bodies of megabytes made to cost as much as they can: memory and time stay in proportion, and others are served."""

# ruff: noqa: E501 - one case a line

import gzip
import json
import random
import socket
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

MIB = 1024 * 1024
# What a request may take beyond what the process has, in bytes: so much, and so many times its own size.
FLOOR_BYTES = MIB
TIMES = 30
# The longest that one bomb may take, and that somebody else may wait meanwhile, in seconds: ten times the goal.
PATIENCE_S = 60.0
OTHERS_S = 2.5  # of the processor
OPEN = b'{"model":"m","messages":['
SAID = b'{"role":"user","content":"hello"}'


def _around(held: bytes) -> bytes:
    """A chat request with these bytes beside its messages."""
    return b'{"model":"m","x":' + held + b',"messages":[' + SAID + b"]}"


def _within(held: bytes) -> bytes:
    """A chat request with these bytes as the content of a message."""
    return OPEN + b'{"role":"user","content":' + held + b"}," + SAID + b"]}"


def _layers(raw: bytes, times: int) -> bytes:
    for _ in range(times):
        raw = gzip.compress(raw)
    return raw


N = 500_000
WORDS = " ".join(random.Random(6).choices(["the", "queue", "reads", "žluť", "report", "x1"], k=300_000))
BOMBS = {
    "empty arrays": _around(b"[" + b"[]," * N + b"[]]"),
    "empty arrays in a message": _within(b"[" + b"[]," * N + b"[]]"),
    "empty objects as messages": OPEN + b"{}," * N + b"{}]}",
    "numbers as messages": OPEN + b"1," * N + b"1]}",
    "objects with a key each": _within(b"[" + b'{"a":1},' * (N // 4) + b"1]"),
    "many keys": b"{" + b",".join(b'"%d":1' % at for at in range(N // 4)) + b',"messages":[' + SAID + b"]}",
    "one key many times": b'{"messages":[],' * 1 + b'"a":1,' * N + b'"messages":[' + SAID + b"]}",
    "many keys in a message": OPEN + b"{" + b",".join(b'"%d":1' % at for at in range(N // 4)) + b"}," + SAID + b"]}",
    "parts": _within(b"[" + b'{"type":"text","text":""},' * (N // 8) + b'{"type":"text","text":""}]'),
    "calls": OPEN + b'{"role":"assistant","tool_calls":[' + b'{"id":"a","function":{"name":"f","arguments":"{}"}},' * (N // 20) + b"{}]}," + SAID + b"]}",
    "arguments": OPEN + b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":' + json.dumps("[" + "[]," * N + "[]]").encode() + b"}}]}," + SAID + b"]}",
    "arguments of less than a mebibyte": OPEN + b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":' + json.dumps("[" + "[]," * (N // 2) + "[]]").encode() + b"}}]}," + SAID + b"]}",
    "objects as arguments": OPEN + b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":' + json.dumps("[" + '{"a":1},' * (N // 8) + "1]").encode() + b"}}]}," + SAID + b"]}",
    "empty objects as messages, fewer": OPEN + b"{}," * (N // 2) + b"{}]}",
    "numbers behind a message": OPEN + SAID + b",1" * (N // 2) + b"]}",
    "tools": b'{"model":"m","tools":[' + b"[]," * (N // 2) + b'[]],"messages":[' + SAID + b"]}",
    "content of numbers": _within(b"[" + b"1," * (N // 20) + b"1]"),
    "a table": _within(b'"' + b"1,2," * N + b'"'),
    "arguments that are deep": OPEN + b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":' + json.dumps("[" * N).encode() + b"}}]}," + SAID + b"]}",
    "deep": _within(b"[" * N + b"]" * N),
    "deep objects": _within(b'{"a":' * N + b"1" + b"}" * N),
    "deep beside": _around(b"[" * N + b"]" * N),
    "never closed": OPEN + b"[" * N,
    "a huge number": _within(b"9" * 2 * MIB),
    "a huge fraction": _within(b"0." + b"9" * 2 * MIB),
    "a huge exponent": _around(b"1e" + b"9" * 2 * MIB),
    "numbers": _around(b"[" + b"1e308," * N + b"1]"),
    "escapes": _within(b'"' + b"\\u0041" * N + b'"'),
    "lone surrogates": _within(b'"' + b"\\ud800" * N + b'"'),
    "quotes": _within(b'"' + b'\\"' * N + b'"'),
    "backslashes": _within(b'"' + b"\\\\" * N + b'"'),
    "no utf-8": _within(b'"' + b"\xff" * 2 * MIB + b'"'),
    "four bytes each": _within(b'"' + "🎉".encode() * N + b'"'),
    "joined marks": _within(b'"' + "👨‍👩‍👧".encode() * 50_000 + b'"'),
    "one letter": _within(b'"' + b"a" * 4 * MIB + b'"'),
    "carets": _within(b'"' + b"^" * 2 * MIB + b'"'),
    "blanks": _within(b'"' + b" " * 2 * MIB + b'"'),
    "white space": b" " * 2 * MIB + OPEN + SAID + b"]}" + b"\n" * 2 * MIB,
    "words": _within(json.dumps(WORDS).encode()),
    "models": b'{"model":"a",' * 1 + b'"x":[' + b'{"model":"b"},' * (N // 8) + b'1],"messages":[' + SAID + b"]}",
    "a long model": b'{"model":"' + b"m" * 2 * MIB + b'","messages":[' + SAID + b"]}",
    "braces": _within(b'"' + b"}" * 2 * MIB + b'"'),
    "an image": _within(b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,' + b"A" * 2 * MIB + b'"}}]'),
    "zeros": b"\0" * 2 * MIB,
}  # fmt: skip
# What the proxy decodes to at most, by default.
MAX_BODY_BYTES = 64 * MIB
ENCODED = {
    "gzip": (b"gzip", gzip.compress(b"\0" * 100 * MIB), b" 413 "),
    "gzip, ten times": (b"gzip, gzip", _layers(b"\0" * 10 * MIB, 10), b"x-compaction-reason: not-json"),
    "deflate": (b"deflate", zlib.compress(b"\0" * 100 * MIB), b" 413 "),
    "br": (b"br", b"\xff" * 100_000, b"x-compaction-reason: encoded"),
    "zstd": (b"zstd", b"\x28\xb5\x2f\xfd" + b"\0" * 100_000, b"x-compaction-reason: encoded"),
}


class _Neighbour(threading.Thread):
    """Somebody else, who asks all the time.

    Attributes:
        longest_s: What the proxy worked while they waited for one answer, in seconds of the processor.
    """

    def __init__(self, proxy: Any) -> None:
        super().__init__(daemon=True)
        self.proxy = proxy
        self.longest_s = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        with socket.create_connection(("127.0.0.1", self.proxy.port), 60) as connection:
            while not self.ended.is_set():
                before_s = self.proxy.cpu_s
                connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
                connection.recv(65_536)
                self.longest_s = max(self.longest_s, self.proxy.cpu_s - before_s)
                time.sleep(0.01)


def _send(port: int, raw: bytes, *fields: bytes) -> bytes:
    """The head of the answer."""
    head = [
        b"POST /v1/chat/completions HTTP/1.1",
        b"host: a",
        b"connection: close",
        b"content-length: %d" % len(raw),
    ]
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.sendall(b"\r\n".join([*head, *fields, b"", raw]))
        return connection.recv(65_536)


def _measured(proxy: Any, raw: bytes, *fields: bytes) -> tuple[bytes, int, float]:
    """The answer, bytes of memory at the most beyond what there were, and the work that others waited for, in seconds."""
    neighbour = _Neighbour(proxy)
    neighbour.start()
    proxy.forget_peak()
    before = proxy.memory_kib("VmRSS")
    answer = _send(proxy.port, raw, *fields)
    neighbour.ended.set()
    neighbour.join()
    return answer, (proxy.memory_kib("VmHWM") - before) * 1024, neighbour.longest_s


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
@pytest.mark.parametrize("way", [b"x-a: the usual way", b"x-compaction-trigger-tokens: 100"])
def test_no_body_costs_more_than_30_times_its_size_or_holds_up_others(proxy: Any, way: bytes) -> None:
    if not Path(f"/proc/{proxy.process.pid}/clear_refs").exists():
        pytest.skip("this kernel does not let go of a peak of memory")
    wrong = []
    for name, raw in BOMBS.items():
        answer, taken, waited_s = _measured(proxy, raw, way)
        if b" 200 " not in answer[:20] or b"reason: internal" in answer:
            wrong.append(f"{name}: {answer[:300]!r}")
        if taken > FLOOR_BYTES + TIMES * len(raw):
            wrong.append(f"{name}: {taken / len(raw):.1f} times its {len(raw)} bytes")
        if waited_s > OTHERS_S:
            wrong.append(f"{name}: others waited for {waited_s:.1f} s of work")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
def test_an_encoded_bomb_is_refused_or_goes_on_as_it_came_within_bounds(proxy: Any) -> None:
    wrong = []
    for name, (coding, raw, said) in ENCODED.items():
        proxy.recorder.taken()
        field = b"content-encoding: " + coding
        answer, taken, _ = _measured(proxy, raw, field, b"x-compaction-trigger-tokens: 100", b"x-case: 1")
        went = [each.body for each in proxy.recorder.taken() if (b"x-case", b"1") in each.fields]
        if went != ([] if b" 413 " in said else [raw]) or said not in answer:
            wrong.append(f"{name}: {answer[:300]!r}")
        if taken > 4 * MAX_BODY_BYTES:
            wrong.append(f"{name}: {taken} bytes more")
    assert not wrong, "\n".join(wrong)


def test_an_answer_that_unpacks_to_a_hundred_times_its_size_passes_and_is_not_kept(proxy: Any) -> None:
    packed = gzip.compress(b'{"usage":' + b" " * 100 * MIB + b"{}}")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    proxy.recorder.answer = lambda _: head % len(packed) + packed
    raw = OPEN + SAID + b"]}"
    answer, taken, waited_s = _measured(
        proxy, raw, b"x-compaction-trigger-tokens: 100", b"x-session-id: packed"
    )
    assert b" 200 " in answer[:20]
    assert taken < 10 * MIB
    assert waited_s < OTHERS_S
