"""Header fields that no sensible client or upstream sends: nothing is smuggled, split or let through."""

# ruff: noqa: E501 - one case a line

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from compaction_proxy.gateway.headers import CREDENTIALS, HOP_BY_HOP, HOP_HEADER

BODY = b"GET /smuggled HTTP/1.1\r\nhost: evil\r\n\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = len(BODY)
LAST = b"GET /v1/last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
# How a body is announced: mostly wrong in one way or another.
FRAMINGS = [
    (b"content-length: %d" % LENGTH, BODY),
    (b"Content-Length:%d" % LENGTH, BODY),
    (b"content-length: 0%d" % LENGTH, BODY),
    (b"content-length: %d\r\ncontent-length: %d" % (LENGTH, LENGTH), BODY),
    (b"content-length: %d\r\ncontent-length: 0" % LENGTH, BODY),
    (b"content-length: 0\r\ncontent-length: %d" % LENGTH, BODY),
    (b"content-length: %d, %d" % (LENGTH, LENGTH), BODY),
    (b"content-length: +%d" % LENGTH, BODY),
    (b"content-length: -1", BODY),
    (b"content-length: 0x%x" % LENGTH, BODY),
    (b"content-length: 4_0", BODY),
    (b"content-length: \xb2", BODY),
    (b"content-length: 99999999999999999999999", BODY),
    (b"content-length:", BODY),
    (b"content-length : %d" % LENGTH, BODY),
    (b" content-length: %d" % LENGTH, BODY),
    (b"content-length\x00: %d" % LENGTH, BODY),
    (b"x: y\ncontent-length: %d" % LENGTH, BODY),
    (b"content_length: %d" % LENGTH, BODY),
    (b"transfer-encoding: chunked", CHUNKED),
    (b"Transfer-Encoding: CHUNKED", CHUNKED),
    (b"transfer-encoding:\tchunked\t", CHUNKED),
    (b"transfer-encoding:\r\n chunked", CHUNKED),
    (b"transfer-encoding: chunked\r\n x", CHUNKED),
    (b"transfer-encoding: \x0bchunked", CHUNKED),
    (b"transfer-encoding: chunked, identity", CHUNKED),
    (b"transfer-encoding: identity, chunked", CHUNKED),
    (b"transfer-encoding: chunked, chunked", CHUNKED),
    (b"transfer-encoding: chunked\r\ntransfer-encoding: identity", CHUNKED),
    (b"transfer-encoding: identity\r\ntransfer-encoding: chunked", CHUNKED),
    (b"transfer-encoding: xchunked", CHUNKED),
    (b"transfer-encoding : chunked", CHUNKED),
    (b"x: y\rtransfer-encoding: chunked", CHUNKED),
    (b"transfer-encoding: chunked\r\ncontent-length: %d" % LENGTH, CHUNKED),
    (b"content-length: 3\r\ntransfer-encoding: chunked", CHUNKED),
    (b"transfer-encoding: chunked", b"%X;a=b\r\n%b\r\n0\r\n\r\n" % (LENGTH, BODY)),
    (b"transfer-encoding: chunked", b'%x;a="\n"\r\n%b\r\n0\r\n\r\n' % (LENGTH, BODY)),
    (b"transfer-encoding: chunked", b"%x\n%b\n0\n\n" % (LENGTH, BODY)),
    (b"transfer-encoding: chunked", b"0x%x\r\n%b\r\n0\r\n\r\n" % (LENGTH, BODY)),
    (b"transfer-encoding: chunked", b"%x \r\n%b\r\n0\r\n\r\n" % (LENGTH, BODY)),
    (b"transfer-encoding: chunked", b"-1\r\n%b\r\n0\r\n\r\n" % BODY),
    (b"transfer-encoding: chunked", b"%x\r\n%bxx0\r\n\r\n" % (LENGTH, BODY)),
    (b"transfer-encoding: chunked", b"fffffffffffffffffff\r\n%b" % BODY),
    (b"transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\nhost: evil\r\ncontent-length: 9\r\n\r\n" % (LENGTH, BODY)),
]  # fmt: skip
# Each list with what may be sent first, and what no server should take.
METHODS = (
    [b"POST", b"GET", b"DELETE", b"OPTIONS", b"PROPFIND"],
    [b"post", b"P\x00ST", b"CONNECT", b"PRI", b"G E T", b""],
)
TARGETS = [
    b"/v1/chat/completions", b"//evil/v1/models", b"/v1/%0d%0ax-evil:%201", b"/v1/%00", b"/v1/a?q=%ff", b"/v1/a#b",
    b"http://evil/v1/models", b"/\\evil", b"/v1/%zz", b"/v1/" + b"a" * 5_000, b"/livez?x", b"/admin/v1/%2e%2e", b"/health/zz",
], [
    b"/v1/../../admin", b"/v1/a?q=\xff", b"/v1/\xe2\x80\xa8", b"/v1/a b", b"/v1/a\tb", b"/v1/a\x7f", b"/v1/a\rb",
    b"http://u:p@evil:99999/", b"*", b"", b"?", b"v1", b"http://[",
]  # fmt: skip
VERSIONS = (
    [b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"],
    [b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 ", b"HTTP/11", b"http/1.1", b""],
)
VALUES = [
    b"", b"1", b"chunked", b"close", b"keep-alive", b"Bearer sk-secret", b"\xff\xfe", b"\xe2\x80\xa8", b"a\r\n folded",
    b'{"level":"error"}', b"x" * 9_000, b"gzip", b"100-continue", b"force", b"bypass", b"-1", b"9" * 400, b"none,,;=", b"\t",
    b"%0d%0a", b"upgrade", b"h2c", b"x-mine, authorization,content-length ,host", b"Transfer-Encoding, x-session-id",
    b"x-compaction-hop", b"websocket",
], [b"a\rb", b"a\nx-evil: 1", b"a\r\nx-evil: 1\r\n\r\n", b"a\x00b", b"\x1b[31m", b"\x7f", b"\r\n\r\nGET /v1/x HTTP/1.1"]  # fmt: skip
NAMES = [
    *sorted(HOP_BY_HOP - {b"transfer-encoding"}), *sorted(CREDENTIALS), b"x-mine", b"X-MINE", b"x-session-id", b"cookie",
    b"expect", b"content-encoding", b"content-type", b"x-compactions", b"accept-encoding", b"Connection", b"connection",
    b"x-compaction-hop", b"x-stainless-timeout", b"x-forwarded-for", b"http2-settings", b"x-claude-code-session-id",
    b"date", b"server", b"session_id",
], [
    b"host", b"bad name", b"bad\xffname", b"", b"bad(name)", b"x\x00y", b"content-length\t", b" leading", b"x-compaction",
    b"x-compaction-pin", b"X-Compaction-Strategy", b"x-compaction-trigger-tokens", b"content-length", b"transfer-encoding",
]  # fmt: skip
COLONS = [b": ", b":", b":\t"], [b" : ", b" ", b"=", b":\r\n"]
ENDS = [b"\r\n"], [b"\n", b"\r", b"\r\r\n"]
# What a server may say of itself at any time besides refusing what was asked.
OURS = {400, 401, 403, 404, 405, 408, 413, 422, 426, 431, 501}


def _sets(n: int) -> Iterator[tuple[bytes, bytes]]:
    """Requests, and how they are framed; each is wrong in few places, so that the others get their turn."""
    rng = random.Random(6)

    def pick(pools: tuple[list[bytes], list[bytes]], wild: float = 0.03) -> bytes:
        return rng.choice(pools[rng.random() < wild])

    for number in range(n):
        framing, body = FRAMINGS[number % len(FRAMINGS)] if rng.random() < 0.5 else (b"", b"")
        fields = [pick(NAMES) + pick(COLONS) + pick(VALUES) for _ in range(rng.randrange(5))]
        if rng.random() < 0.97:
            fields.append(b"host: proxy")
        if framing:
            fields.insert(rng.randrange(len(fields) + 1), framing)
        target = pick(TARGETS, 0.1) if rng.random() < 0.5 else b"/v1/models"
        first = b" ".join([pick(METHODS), target, pick(VERSIONS)])
        yield pick(ENDS).join([first, *fields, b"", b""]) + body, framing


def _status(head: bytes) -> int:
    """The status of an answer whose head is as it must be."""
    first, *lines = head.split(b"\r\n")
    assert re.fullmatch(rb"HTTP/1\.1 [1-5]\d\d [A-Za-z' -]*", first), head
    for line in lines:
        assert re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\x00-\x08\x0a-\x1f\x7f]*", line), head
    framings = re.findall(rb"(?im)^(?:content-length: \d+|transfer-encoding: chunked)\r?$", head)
    announced = re.findall(rb"(?im)^(?:content-length|transfer-encoding):", head)
    assert len(framings) == len(announced) <= 1, head
    return int(first[9:12])


def _answers(raw: bytes) -> list[int]:
    """The status of each answer that a connection gave. The recorder's have no chunks."""
    found: list[int] = []
    while raw:
        head, whole, raw = raw.partition(b"\r\n\r\n")
        assert whole, head
        status = _status(head)
        if status != 100:
            found.append(status)
        length = re.search(rb"(?im)^content-length: (\d+)", head)
        raw = raw[int(length[1]) :] if length else raw
    return found


def _named(raw: bytes) -> set[bytes]:
    """Every word that a request's `connection` fields may name."""
    about = re.findall(rb"(?im)^connection\s*:([^\r\n]*)", raw)
    return {word.strip().lower() for held in about for word in held.split(b",")} - {
        b"host",
        b"content-length",
        HOP_HEADER,
    }


def _wrongs(raw: bytes, framing: bytes, got: bytes, came: list[Any]) -> Iterator[str]:
    statuses = _answers(got)
    relayed = [each for each in came if each.first != b"GET /v1/last HTTP/1.1"]
    if foreign := [status for status in statuses if status != 200 and status not in OURS]:
        yield f"answered with {foreign}"
    if 501 in statuses and b"transfer-encoding" not in raw.lower():
        yield "501 without a transfer coding"
    if statuses.count(200) < len(came):
        yield f"{len(came)} went on, {statuses} came back"
    yield from _wrongs_on(raw, relayed)
    if framing and len([each for each in relayed if b"/smuggled" in each.first]) > _harmless(framing):
        yield "a body was taken for a request"


def _wrongs_on(raw: bytes, relayed: list[Any]) -> Iterator[str]:
    """What is wrong with requests that went on."""
    sent = {name.strip().lower() for name in re.findall(rb"(?m)(?:^|\r)([^:\r\n]*):", raw)}
    for each in relayed:
        names = [name.lower() for name, _ in each.fields]
        allowed = sent | {b"host", b"content-length", b"transfer-encoding", HOP_HEADER}
        if foreign_names := set(names) - allowed:
            yield f"nobody sent {foreign_names}"
        if kept := set(names) & ((HOP_BY_HOP - {b"transfer-encoding"}) | _named(raw) | {b"expect"}):
            yield f"{kept} went on"
        if [name for name in names if name.startswith(b"x-compaction") and name != HOP_HEADER]:
            yield "a field of ours went on"
        if each.body not in (b"", BODY):
            yield f"the body {each.body!r}"


def _harmless(framing: bytes) -> int:
    """How often a body may be taken for a request: where no field of that name announces it as one."""
    return int(framing.startswith(b"content_length"))


def test_no_header_of_a_request_smuggles_splits_or_goes_on_that_must_not(
    proxy: Any, pytestconfig: pytest.Config
) -> None:
    n = 5_000 if pytestconfig.getoption("--runslow") else 500
    wrong: list[str] = []
    passed = 0
    for raw, framing in _sets(n):
        got = proxy.ask(raw + LAST)
        came = proxy.recorder.taken()
        passed += bool(came)
        wrong += [f"{each}: {raw[:600]!r} → {got[:300]!r}" for each in _wrongs(raw, framing, got, came)]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:8])
    assert passed > n // 10  # else nothing was shown of what goes on


STATUSES = [b"200 OK", b"200", b"404 Not Found", b"429 \xff", b"500 No", b"599 x", b"204 No", b"304 Not"], [
    b"101 Switching", b"999 x", b"600 x", b"20 x", b"2000 x", b"-1 x", b"", b"200 OK\rx", b"200 O\x00K", b"\xb2\xb2\xb2 x",
]  # fmt: skip
ANSWERED = b'{"choices":[]}'
ANSWER_FRAMINGS = [
    (b"content-length: %d" % len(ANSWERED), ANSWERED),
    (b"transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(ANSWERED), ANSWERED)),
], [
    (b"content-length: %d\r\ncontent-length: %d" % (len(ANSWERED), len(ANSWERED)), ANSWERED),
    (b"content-length: %d\r\ncontent-length: 2" % len(ANSWERED), ANSWERED),
    (b"content-length: %d, %d" % (len(ANSWERED), len(ANSWERED)), ANSWERED),
    (b"content-length: +%d" % len(ANSWERED), ANSWERED),
    (b"content-length: -1", ANSWERED),
    (b"content-length: 99999999999999999999999", ANSWERED),
    (b"content-length: 9\r\ntransfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(ANSWERED), ANSWERED)),
    (b"transfer-encoding: chunked", b"zz\r\n" + ANSWERED),
    (b"transfer-encoding: chunked", b"ffffffffffffffffff\r\n" + ANSWERED),
    (b"transfer-encoding: gzip, chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(ANSWERED), ANSWERED)),
    (b"transfer-encoding: identity", ANSWERED),
    (b"transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\nx-evil: 1\r\n\r\n" % (len(ANSWERED), ANSWERED)),
    (b"", ANSWERED),
    (b"content-length: 3", ANSWERED + b"\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    (b"content-length: 900", ANSWERED),
]  # fmt: skip
NOT_BACK = (HOP_BY_HOP - {b"connection", b"transfer-encoding"}) | {b"server"}


def _hostile(rng: random.Random) -> bytes:
    def pick(pools: tuple[list[bytes], list[bytes]], wild: float = 0.03) -> bytes:
        return rng.choice(pools[rng.random() < wild])

    framing, body = rng.choice(ANSWER_FRAMINGS[rng.random() < 0.3])
    fields = [pick(NAMES) + pick(COLONS) + pick(VALUES) for _ in range(rng.randrange(6))]
    fields.insert(rng.randrange(len(fields) + 1), framing)
    kept = [each for each in fields if each]
    first = pick((VERSIONS[0][:1], VERSIONS[1])) + b" " + pick(STATUSES, 0.1)
    return pick(ENDS).join([first, *kept, b"connection: close", b"", b""]) + body


def _behind(head: bytes, rest: bytes) -> bytes:
    """What stands behind the first answer's body."""
    length = re.search(rb"(?im)^content-length: (\d+)", head)
    if length:
        return rest[int(length[1]) :]
    while chunk := re.match(rb"([0-9a-f]+)\r\n", rest):
        rest = rest[chunk.end() + int(chunk[1], 16) + 2 :]
        if chunk[1] == b"0":
            return rest
    return b""  # cut


def _wrongs_back(answer: bytes, got: bytes) -> Iterator[str]:
    head, whole, rest = got.partition(b"\r\n\r\n")
    assert whole, got
    status = _status(head)
    names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
    if (
        status >= 500
        and b"upstream_protocol_error" not in got
        and b"%d" % status not in answer.split(b"\n")[0]
    ):
        yield f"a {status} of ours"
    if kept := set(names) & (
        NOT_BACK | _named(answer) - {b"", b"connection", b"transfer-encoding", b"date", b"close"}
    ):
        yield f"{kept} came back"
    if names.count(b"date") != 1 or names.count(b"content-length") > 1:
        yield "fields that stand twice"
    if b"upstream_protocol_error" not in rest and not (rest in answer or ANSWERED in rest):
        yield f"another body: {rest!r}"
    if _behind(head, rest):
        yield "two answers"


def test_no_header_of_an_answer_splits_it_or_goes_back_that_must_not(
    proxy: Any, pytestconfig: pytest.Config
) -> None:
    n = 5_000 if pytestconfig.getoption("--runslow") else 500
    rng = random.Random(8)
    wrong: list[str] = []
    passed = 0
    for number in range(n):
        answer = _hostile(rng)
        proxy.recorder.answer = lambda _, said=answer: said
        path = (b"/v1/chat/completions", b"/v1/embeddings")[number % 2]
        got = proxy.ask(
            b"POST %b HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}" % path
        )
        passed += b"upstream_protocol_error" not in got
        wrong += [f"{each}: {answer[:600]!r} → {got[:300]!r}" for each in _wrongs_back(answer, got)]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:8])
    assert passed > n // 10
