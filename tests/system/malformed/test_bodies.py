"""Bodies that no sensible client sends, through the whole proxy: each goes on, and none is a fault of ours."""

# ruff: noqa: E501 - one case a line

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.strategies import STRATEGIES

JsonObject = dict[str, Any]
CHAT = "/v1/chat/completions"
# The upstream's answers say that so many tokens were read.
SAYS = ("hello", "The service reads its queue and writes a report. " * 8)

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)  # lone surrogates, too
NUMBERS = st.sampled_from(
    [0, -1, 2**63, 10**30, -(10**400), 10**4_000, 1e308, float("inf"), float("nan"), -0.0]
)
SCALARS = st.none() | st.booleans() | st.integers() | NUMBERS | ANY_TEXT
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)


def wrongly(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what it should be."""
    return st.one_of(right, right, ANYTHING)


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "critic", ""])
IDS = st.sampled_from(["call_1", "call_2", ""])
URLS = st.sampled_from(
    ["data:image/png;base64,AAAA", "data:;base64,!!", "data:", "http://[", "https://a/b?c#d", ""]
)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": wrongly(IDS),
        "type": wrongly(st.just("function")),
        "function": wrongly(
            st.fixed_dictionaries(
                {},
                optional={
                    "name": wrongly(ANY_TEXT),
                    "arguments": wrongly(
                        st.sampled_from(
                            ["{}", '{"a":1e999}', "[" * 90, '{"a":NaN}', '"\\ud800"', "9" * 5_000]
                        )
                    ),
                },
            )
        ),
    },
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "type": wrongly(
            st.sampled_from(["text", "image_url", "input_audio", "file", "refusal", "video_url"])
        ),
        "text": wrongly(ANY_TEXT),
        "image_url": wrongly(
            st.fixed_dictionaries({"url": wrongly(URLS)}, optional={"detail": wrongly(st.just("low"))})
        ),
        "input_audio": wrongly(
            st.fixed_dictionaries({"data": wrongly(URLS), "format": wrongly(st.just("wav"))})
        ),
        "file": wrongly(
            st.fixed_dictionaries({"file_data": wrongly(URLS)}, optional={"file_id": wrongly(IDS)})
        ),
        "refusal": wrongly(ANY_TEXT),
        "cache_control": ANYTHING,
    },
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": wrongly(ROLES),
        "content": wrongly(ANY_TEXT | st.lists(wrongly(PARTS), max_size=3)),
        "name": wrongly(ANY_TEXT),
        "refusal": wrongly(ANY_TEXT),
        "tool_call_id": wrongly(IDS),
        "tool_calls": wrongly(st.lists(wrongly(CALLS), max_size=3)),
        "function_call": wrongly(CALLS),
        "reasoning_content": wrongly(ANY_TEXT),
        "audio": ANYTHING,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"messages": wrongly(st.lists(wrongly(MESSAGES), max_size=5))},
    optional={
        "model": wrongly(st.just("m") | ANY_TEXT),
        "max_tokens": wrongly(st.integers() | NUMBERS),
        "max_completion_tokens": wrongly(st.integers() | NUMBERS),
        "tools": wrongly(st.lists(ANYTHING, max_size=2)),
        "functions": ANYTHING,
        "response_format": ANYTHING,
        "n": wrongly(st.integers()),
        "stream": wrongly(st.booleans()),
        "stream_options": ANYTHING,
        "user": ANYTHING,
        "metadata": ANYTHING,
    },
)
# What comes before the messages of some: enough to be compacted.
HISTORY = [
    {
        "role": ("user", "assistant")[number % 2],
        "content": f"{number}: " + "It reads a queue and writes. " * 20,
    }
    for number in range(9)
]
# Replaced by each other, where they stand.
TOKENS = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000",
    b"NaN", b"-Infinity", b"1e999", b"-", b"0" * 50, b"9" * 5_000, b"[" * 1_100, b'{"a":' * 1_100, b"\r\n", b"\xe2\x80\xa8",
    b'"messages":[],', b'"model":"x",', b'"role":"system",', b"//", b"'", b"\\x", b"\\u12", b"null", b"tru", b" " * 300, b"",
]  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON with values of the wrong kinds, or what is nearly JSON."""
    request = draw(REQUESTS)
    if draw(st.integers(0, 3)) == 0 and isinstance(request["messages"], list):
        request = {**request, "messages": HISTORY + request["messages"]}
    if draw(st.booleans()):
        raw = json.dumps(request).encode()
    else:
        raw = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.sampled_from(TOKENS)) + raw[at + draw(st.integers(0, 3)) :]
    return raw


WAYS = st.sampled_from(
    [(), (b"x-compaction: force",), *[(b"x-compaction-trigger-tokens: 100", b"x-compaction-strategy: %b" % each.encode()) for each in STRATEGIES]]
)  # fmt: skip


def came_for(proxy: Any, case: int) -> list[bytes]:
    """The bodies that went on of one request; summaries and questions of our own are none."""
    mark = (b"x-case", b"%d" % case)
    return [each.body for each in proxy.recorder.taken() if mark in each.fields]


def wrongs(body: bytes, answer: tuple[int, bytes, bytes], went: list[bytes]) -> str:
    status, head, _ = answer
    ours = dict(re.findall(rb"(?m)^x-compaction-(\S+): (.*?)\r?$", head))
    if status != 200:
        return f"{status}"
    if ours.get(b"reason") == b"internal":
        return "a fault of ours was hidden"
    if len(went) != 1:
        return f"went on {len(went)} times"
    if went[0] != body and ours.get(b"status") not in {b"applied", b"reused"}:
        return f"{ours}, and yet not as it came"
    if went[0] != body and not (len(went[0]) < len(body) and json.loads(went[0])["messages"]):
        return "no smaller request"
    return ""


def examples(number: int) -> settings:
    """So many, the same each time, however long they take."""
    return settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def test_no_body_is_a_fault_of_ours_or_goes_on_changed_without_a_compaction(
    proxy: Any, pytestconfig: pytest.Config
) -> None:
    n = 6_000 if pytestconfig.getoption("--runslow") else 600
    case = 0

    @examples(n)
    @given(bodies(), WAYS, st.sampled_from([b"a", b"b", b"\xff", b""]))
    def tried(body: bytes, way: tuple[bytes, ...], session: bytes) -> None:
        nonlocal case
        case += 1
        answer = proxy.post(CHAT, body, b"x-case: %d" % case, b"x-session-id: " + session, *way)
        assert not (wrong := wrongs(body, answer, came_for(proxy, case))), wrong

    tried()
    assert case >= n


def test_no_path_header_of_ours_or_noise_is_a_fault_of_ours(proxy: Any, pytestconfig: pytest.Config) -> None:
    n = 14_000 if pytestconfig.getoption("--runslow") else 1_400
    tried_of = 0
    line = st.binary(max_size=60).map(lambda raw: raw.translate(None, bytes([*range(32), 127])))
    asked = st.sampled_from(
        [b"x-compaction", b"x-compaction-pin", b"x-compaction-strategy", b"x-compaction-trigger-tokens"]
    )
    names = asked | st.sampled_from(
        [b"x-session-id", b"authorization", b"x-stainless-timeout", b"content-encoding"]
    )
    segments = st.sampled_from(
        ["openai", "deployments", "%0a%1b", "%ff", "..", ".", "v1", "%2e%2e", "", "admin", "%e2%80%a8"]
    )
    paths = st.lists(segments, max_size=4).map(lambda each: "/" + "/".join([*each, "chat/completions"]))

    @examples(n)
    @given(st.binary(max_size=200), paths, st.lists(st.tuples(names, line), max_size=4))
    def tried(body: bytes, path: str, fields: list[tuple[bytes, bytes]]) -> None:
        nonlocal tried_of
        tried_of += 1
        status, _, answer = proxy.post(path, body, *map(b": ".join, fields))
        assert status < 500, (status, answer)

    tried()
    assert tried_of >= n


@pytest.mark.parametrize(
    "said",
    [
        b'{"\xff":{}}',
        b'{"usage":{"prompt_tokens":' + b"9" * 5_000 + b"}}",
        b"[" * 9_000,
        b'{"choices":[{"x":"\xff"}]}',
        b"NaN",
        b"{",
    ],
)
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_no_answer_is_a_fault_of_ours(proxy: Any, said: bytes, status: int, kind: bytes) -> None:
    framed = b"data: " + said + b"\n\n" if kind.endswith(b"stream") else said
    head = b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\ncontent-type: %b\r\n\r\n" % (status, len(framed), kind)
    proxy.recorder.answer = lambda _: head + framed
    body = json.dumps({"model": "m", "messages": HISTORY}).encode()
    got, _, answer = proxy.post(CHAT, body, b"x-session-id: odd", b"x-compaction-trigger-tokens: 100000")
    assert (got, answer) == (status, framed)
