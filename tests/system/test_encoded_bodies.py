"""Request bodies in zstd, gzip, deflate and br are read and compacted like plain ones, within bounds."""

import gzip
import json
import random
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import brotli
import httpx
import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, run_proxy

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MB = 1_000_000
MIB = 1_048_576
CHAT, RESPONSES, MESSAGES = PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
CASE = "x-case"


def deflate_raw(data: bytes) -> bytes:
    """Deflate without the header of zlib, as some clients send it."""
    engine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return engine.compress(data) + engine.flush()


# The same data gives the same bytes whenever it is compressed.
compress_gzip = partial(gzip.compress, mtime=0)


def gzip_in_two_members(data: bytes) -> bytes:
    return compress_gzip(data[:1_000]) + compress_gzip(data[1_000:])


def zstd_in_frames(data: bytes) -> bytes:
    """Two frames with one between them that decoders skip."""
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"
    return zstd.compress(data[:1_000]) + skipped + zstd.compress(data[1_000:])


def compress_br(data: bytes) -> bytes:
    return bytes(brotli.compress(data, quality=4))


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "zstd": ("zstd", zstd.compress),
    "zstd in frames": ("zstd", zstd_in_frames),
    "gzip": ("gzip", compress_gzip),
    "gzip in members": ("gzip", gzip_in_two_members),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", deflate_raw),
    "br": ("br", compress_br),
    "gzip, then zstd": ("gzip, zstd", lambda data: zstd.compress(compress_gzip(data))),
}


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    running = Provider()
    yield running
    running.close()


@pytest.fixture(scope="module")
def proxy(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    config = {"models": {"m": {"window": 4_000_000}}}  # so that nothing is due that was not asked for
    with run_proxy(tmp_path_factory.mktemp("proxy"), provider.url, config, watched_loop=True) as running:
        yield running


def write_text(seed: object, size: int) -> str:
    """Words drawn by lot, which compress about as well as prose."""
    drawn = random.Random(str(seed))
    words = [
        "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(2_000)
    ]
    return " ".join(drawn.choices(words, k=size // 6))[:size]


def decompress(coding: str, data: bytes) -> bytes:
    """What the library alone does to decode."""
    return zstd.decompress(data) if coding == "zstd" else gzip.decompress(data)


def make_body(path: str, size: int, seed: str = "", turns: int = 24) -> bytes:
    """A conversation of about so many bytes on one of the wires."""
    said = []
    for turn in range(turns):
        said.append({"role": "user", "content": f"Question {turn}: {write_text((path, seed, turn), 100)}?"})
        said.append({"role": "assistant", "content": write_text((path, size, seed, turn), size // turns)})
    said.append({"role": "user", "content": "Go on."})
    name = "input" if path == RESPONSES else "messages"
    extra = {"max_tokens": 100} if path == MESSAGES else {}
    return json.dumps({"model": "m", **extra, name: said}).encode()


def post(
    proxy: Proxy, path: str, body: bytes, coding: str | None, case: str, **fields: str
) -> httpx.Response:
    headers = {CASE: case, **{name.replace("_", "-"): value for name, value in fields.items()}}
    if coding is not None:
        headers["content-encoding"] = coding
    with proxy.client(verify=False) as client:  # loads no certificates
        return client.post(path, content=body, headers={"content-type": "application/json", **headers})


def find_forwarded(provider: Provider, case: str) -> Received:
    """The client's request as the provider got it; summary calls do not carry its fields."""
    (found,) = (each for each in provider.received if each.headers.get(CASE) == case)
    return found


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("path", PATHS)
def test_an_encoded_conversation_is_compacted_and_goes_on_unencoded(
    provider: Provider, proxy: Proxy, path: str, encoder: str
) -> None:
    coding, encode = ENCODERS[encoder]
    body, case = make_body(path, 120_000, encoder), f"compacted {path} {encoder}"
    got = post(proxy, path, encode(body), coding, case, x_compaction="force")
    forwarded = find_forwarded(provider, case)
    assert (got.status_code, got.headers["x-compaction-status"]) == (200, "applied")
    assert "content-encoding" not in forwarded.headers
    assert forwarded.headers["content-length"] == str(len(forwarded.body))
    assert len(forwarded.body) < len(body) // 2
    name = "input" if path == RESPONSES else "messages"
    assert json.loads(forwarded.body)[name][-1]["content"] == "Go on."


@pytest.mark.parametrize("size", [1_000, 300_000])
@pytest.mark.parametrize("path", PATHS)
def test_an_encoded_body_that_needs_no_change_is_read_and_goes_on_as_the_bytes_that_came(
    provider: Provider, proxy: Proxy, path: str, size: int
) -> None:
    for encoder, (coding, encode) in ENCODERS.items():
        sent, case = encode(make_body(path, size)), f"unchanged {path} {size} {encoder}"
        got = post(proxy, path, sent, coding, case)
        forwarded = find_forwarded(provider, case)
        assert forwarded.body == sent, encoder
        assert forwarded.headers["content-encoding"] == coding
        assert forwarded.headers["content-length"] == str(len(sent))
        assert (got.status_code, got.headers.get("x-compaction-reason")) == (200, None), encoder


@pytest.mark.parametrize("coding", [None, "gzip"])
@pytest.mark.parametrize("path", PATHS)
def test_digests_of_the_body_go_on_only_with_the_bytes_that_came(
    provider: Provider, proxy: Proxy, path: str, coding: str | None
) -> None:
    digests = dict.fromkeys(("content_md5", "content_digest", "digest", "repr_digest"), "d")
    names = {name.replace("_", "-") for name in digests}
    for size, ours, kept in ((1_000, {}, names), (120_000, {"x_compaction": "force"}, set())):
        body, case = make_body(path, size, "digests"), f"digests {path} {coding} {size}"
        sent = body if coding is None else gzip.compress(body)
        assert post(proxy, path, sent, coding, case, **digests, **ours).status_code == 200
        forwarded = find_forwarded(provider, case)
        assert (names & set(forwarded.headers), forwarded.body == sent) == (kept, bool(kept))


@pytest.mark.parametrize("path", PATHS)
def test_an_encoded_body_is_sized_by_what_is_in_it(proxy: Proxy, path: str) -> None:
    said = "All work and no play makes Jack a dull boy. " * 10_000
    name = "input" if path == RESPONSES else "messages"
    body = json.dumps({"model": "m", "max_tokens": 9, name: [{"role": "user", "content": said}]}).encode()
    sent = zstd.compress(body)
    assert len(sent) < 1_000
    got = post(proxy, path, sent, "zstd", f"sized {path}", x_compaction_trigger_tokens="1000000")
    assert int(got.headers.get("x-compaction-tokens-before", 0)) > 50_000


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_decodes_to_more_than_the_largest_is_refused_in_the_shape_of_its_wire(
    proxy: Proxy, path: str
) -> None:
    bombs = {"gzip": gzip.compress(b" " * 70 * MIB), "zstd": zstd.compress(b" " * 70 * MIB)}
    for coding, bomb in bombs.items():
        got = post(proxy, path, bomb, coding, f"bomb {path} {coding}")
        assert got.status_code == 413
        error = got.json()["error"]
        assert "67108864 bytes" in error["message"]
        assert ("type" in got.json()) == (path == MESSAGES)


def test_a_body_that_cannot_be_decoded_goes_on_as_it_came_and_says_so(
    provider: Provider, proxy: Proxy
) -> None:
    body = make_body(CHAT, 50_000)
    engine = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    bodies = {
        "of an unknown coding": ("snappy", body),
        "of three codings": ("gzip, gzip, gzip", gzip.compress(gzip.compress(gzip.compress(body)))),
        "with a large window": ("zstd", engine.compress(body) + engine.flush()),
        "of many members": ("gzip", gzip.compress(b"") * 20_000),
        "plain after all": ("zstd", body),
        "empty": ("gzip", b""),
        "of another coding": ("br", gzip.compress(body)),
        **{f"torn {name}": (coding, encode(body)[:-9]) for name, (coding, encode) in ENCODERS.items()},
        **{
            f"{name} and more": (coding, encode(body) + b"more")
            for name, (coding, encode) in ENCODERS.items()
        },
    }
    for name, (coding, sent) in bodies.items():
        got = post(proxy, CHAT, sent, coding, name, x_compaction="force")
        assert (got.status_code, got.headers["x-compaction-status"]) == (200, "none"), name
        assert got.headers["x-compaction-reason"] == "encoded", name
        forwarded = find_forwarded(provider, name)
        assert (forwarded.body, forwarded.headers["content-encoding"]) == (sent, coding), name


def test_two_hundred_bombs_and_torn_bodies_stay_within_the_memory_bound(
    tmp_path: Path, provider: Provider
) -> None:
    limit = 4 * MIB
    config = {"server": {"max_body_bytes": limit}}
    blank = b" " * 40 * MIB
    window = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 23})
    noise = random.Random(1).randbytes(30_000)
    kinds = [
        ("gzip", gzip.compress(blank), 413),
        ("zstd", zstd.compress(blank), 413),
        ("br", compress_br(blank), 413),
        ("deflate", zlib.compress(blank), 413),
        ("gzip, zstd", zstd.compress(gzip.compress(blank)), 413),
        ("gzip", gzip.compress(b" " * 3 * MIB)[:-9], 200),
        ("zstd", window.compress(noise, window.FLUSH_BLOCK)[:-9], 200),
        ("br", compress_br(noise)[:-9], 200),
    ]
    with run_proxy(tmp_path, provider.url, config) as proxy:
        post(proxy, CHAT, gzip.compress(make_body(CHAT, 1_000)), "gzip", "warm")
        before = proxy.memory_bytes("VmRSS")
        together = threading.Barrier(50)

        def send(number: int) -> tuple[int, int]:
            coding, sent, expected = kinds[number % len(kinds)]
            together.wait()
            return expected, post(proxy, PATHS[number % 3], sent, coding, f"many {number}").status_code

        with ThreadPoolExecutor(50) as pool:
            statuses = Counter(pool.map(send, range(200)))
        taken = proxy.memory_bytes("VmHWM") - before
        with proxy.client() as client:
            gauges = client.get("/metrics").text.splitlines()
    # A decoder that waited in vain for room is refused with 503 as any upload.
    assert set(statuses) <= {(413, 413), (413, 503), (200, 200), (200, 503)}
    assert statuses[413, 413] > 0
    assert statuses[200, 200] > 0
    assert taken < 96 * MIB  # for 50 bodies of 40 MiB, without a bound, 2,000 MiB
    assert "inflight_body_bytes 0.0" in gauges


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("coding", ["zstd", "gzip"])
def test_an_encoded_body_costs_little_more_than_decoding_and_the_plain_body(
    proxy: Proxy, path: str, coding: str
) -> None:
    _, encode = ENCODERS[coding]
    body = make_body(path, MB)
    sent = encode(body)
    ratios = []
    for round_number in range(5):  # other work of the machine can only make a round look dearer
        costs = {}
        for name, content, used in (("plain", body, None), ("encoded", sent, coding)):
            proxy.wait_for_quiet()
            started = proxy.cpu_s
            for number in range(20):
                got = post(proxy, path, content, used, f"cost {round_number} {name} {number}")
                assert (got.status_code, got.headers.get("x-compaction-reason")) == (200, None)
            proxy.wait_for_quiet()
            costs[name] = proxy.cpu_s - started
        began = time.thread_time()
        for _ in range(20):
            decompress(coding, sent)
        costs["decoding"] = time.thread_time() - began
        ratios.append(costs["encoded"] / (costs["plain"] + costs["decoding"]))
        if ratios[-1] <= 1.3:
            break
    assert min(ratios) <= 1.3, ratios


def test_while_large_bodies_are_decoded_the_event_loop_is_not_held(proxy: Proxy) -> None:
    """60 MB take a decoder a multiple of what a step of the loop may take."""
    body = b"x" + b" " * (60 * MB - 1)  # the first byte shows that it is no JSON: reading it takes no time
    sent = {"gzip": gzip.compress(body), "zstd": zstd.compress(body)}
    longest = []
    for _ in range(3):
        with proxy.watch_loop() as held:
            for coding, content in sent.items():
                got = post(proxy, CHAT, content, coding, "held")
                assert got.headers["x-compaction-reason"] == "not-json"  # it was decoded, and read
        longest.append(max(held, default=0.0))
    assert min(longest) < 0.1, longest


def read_report(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["report"]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_compact_endpoint_takes_encoded_lists(proxy: Proxy, encoder: str) -> None:
    coding, encode = ENCODERS[encoder]
    got = post(proxy, "/v1/compact", encode(make_body(CHAT, 60_000)), coding, "compact")
    assert read_report(got)["status"] == "applied"


def test_the_compact_endpoint_of_responses_takes_encoded_input_where_the_upstream_has_none(
    tmp_path: Path,
) -> None:
    upstream = Provider(lambda request: Reply(404) if request.path.endswith("/compact") else Reply())
    body = make_body(RESPONSES, 60_000)
    try:
        with run_proxy(tmp_path, upstream.url) as proxy:
            for coding, sent in (("zstd", zstd.compress(body)), ("gzip", gzip.compress(body))):
                got = post(proxy, "/v1/responses/compact", sent, coding, coding)
                assert (got.status_code, got.json().get("object")) == (200, "response.compaction")
                assert find_forwarded(upstream, coding).body == sent
    finally:
        upstream.close()
