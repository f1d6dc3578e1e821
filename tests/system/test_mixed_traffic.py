"""Of mixed traffic, every surface tells the same sums, and they are those of the provider's bill."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.helpers.summaries import put_as_asked
from tests.system.black_box import Provider, Proxy, Received, Reply, run_proxy

REQUESTS = 500
WRITER = "writer"
# Dollars for a million tokens: input, cached input, output.
PRICES = {
    "model-a": (2.0, 0.5, 8.0),
    "model-b": (1.0, 0.25, 4.0),
    "model-c": (0.5, 0.125, 2.0),
    "model-d": (4.0, 1.0, 16.0),
    WRITER: (0.25, 0.25, 1.0),
}
MODELS = [name for name in PRICES if name != WRITER]
TENANTS = ("sk-one", "sk-two", "sk-three")
CONFIG: dict[str, Any] = {
    "models": {
        name: {
            "window": 64_000,
            "prices": dict(zip(("input", "cached", "output"), prices, strict=True)),
        }
        for name, prices in PRICES.items()
    },
    "compaction": {"strategy": "chained", "trigger": [{"tokens": 4_000}], "background": False},
    "summary": {"model": WRITER},
}
ANSWER = "The answer is short and ends here."
SUMMARY = "The user asked for words, and the assistant gave them. Nothing else is open. " * 6
SMALL_WORDS, TURN_WORDS, FIRST_WORDS = 180, 180, 1_200
POOL = ("river", "stone", "window", "paper", "green", "table", "music", "garden", "silver", "morning")
WORD = re.compile(r"\w+|[^\w\s]")
CACHE_BLOCK = 128
SHARE = 0.01
DOLLAR_ERROR = 1e-9


def write_words(count: int, seed: int) -> str:
    return " ".join(POOL[(seed + k * (seed % 7 + 1)) % len(POOL)] for k in range(count))


def count_tokens(messages: Iterable[dict[str, Any]]) -> int:
    """Words and signs, and four tokens a message."""
    return 3 + sum(4 + len(WORD.findall(each["content"])) for each in messages)


class Request(NamedTuple):
    """A request of the run.

    Attributes:
        number: From 0.
        is_small: Whether it stays below the gate.
        fault: How the provider fails, or an empty text.
        is_stream: Whether it asks for a stream.
        has_usage: Whether its whole answer reports `usage`.
    """

    number: int
    is_small: bool
    fault: str
    is_stream: bool
    has_usage: bool


def list_requests() -> list[Request]:
    """60 % are small, 5 % fail in four ways, half of them are streams; a ninth of these report no usage."""
    requests, streams = [], 0
    for number in range(REQUESTS):
        block, place = divmod(number, 20)
        fault = ""
        if place == (8 if block % 2 else 7):  # small and large ones by turns
            fault = ("429", "503", "cut", "unanswered")[block // 2 % 4]
        is_stream = number % 2 == 0
        streams += is_stream
        has_usage = not is_stream or streams % 9 != 0
        requests.append(Request(number, number % 5 < 3, fault, is_stream, has_usage))
    return requests


@dataclass(frozen=True)
class Call:
    """What the provider charges for one answer, and whether it has said so in `usage`."""

    model: str
    prompt: int
    cached: int
    completion: int
    is_told: bool

    @property
    def dollars(self) -> float:
        fresh, cached, written = PRICES[self.model]
        amount = (self.prompt - self.cached) * fresh + self.cached * cached + self.completion * written
        return amount / 1_000_000


class Bill:
    """A provider that counts and charges for what it reads, and fails as the `user` of a request asks."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, request: Received) -> Reply:
        if request.method != "POST":
            return Reply(404)
        body = request.json()
        messages, model = body["messages"], body["model"]
        kind = body.get("user", "")
        if kind == "unanswered":
            return Reply(0)
        if kind in {"429", "503"}:
            return Reply(int(kind), b'{"error": {"message": "not now"}}')
        asked = [each["content"] for each in messages]
        text = put_as_asked(SUMMARY, *asked) if model == WRITER else ANSWER
        has_usage = not body.get("stream") or "stream_options" in body
        prompt = count_tokens(messages)
        cached = prompt // 2 // CACHE_BLOCK * CACHE_BLOCK if len(messages) > 2 and model != WRITER else 0
        call = Call(model, prompt, cached, len(text.split()), has_usage and kind != "cut")
        self.calls.append(call)
        reply = reply_in_events(call, text, has_usage) if body.get("stream") else reply_whole(call, text)
        return (
            Reply(body=reply.body[: len(reply.body) // 2], headers=reply.headers, cut=True) if kind else reply
        )

    def of_requests(self) -> list[Call]:
        return [call for call in self.calls if call.model != WRITER]

    def of_summaries(self) -> list[Call]:
        return [call for call in self.calls if call.model == WRITER]


def build_usage(call: Call) -> dict[str, Any]:
    return {
        "prompt_tokens": call.prompt,
        "completion_tokens": call.completion,
        "total_tokens": call.prompt + call.completion,
        "prompt_tokens_details": {"cached_tokens": call.cached},
    }


def reply_whole(call: Call, text: str) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = {"id": "c1", "object": "chat.completion", "created": 1, "model": call.model, "choices": [choice]}
    return Reply(body=json.dumps({**body, "usage": build_usage(call)}).encode())


def reply_in_events(call: Call, text: str, has_usage: bool) -> Reply:  # noqa: FBT001 - there is one caller
    shared = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": call.model}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    if has_usage:
        chunks.append({"choices": [], "usage": build_usage(call)})
    lines = [f"data: {json.dumps({**shared, **each})}\n\n" for each in chunks]
    body = "".join([*lines, "data: [DONE]\n\n"]).encode()
    return Reply(body=body, headers={"content-type": "text/event-stream"})


class Client:
    """Sends the requests of the run, and knows what it has sent.

    Attributes:
        sent_tokens: Tokens of the requests of which the sums can know.
        uncounted: Number of the others.
        small: Number of answers that say that the request was not inspected.
    """

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._turns: Counter[str] = Counter()
        self.sent_tokens = 0
        self.uncounted = 0
        self.small = 0

    def send_all(self, requests: Iterable[Request]) -> None:
        with self._proxy.client() as client:
            for request in requests:
                self._send(client, request)

    def _send(self, client: httpx.Client, request: Request) -> None:
        number = request.number
        tenant, model = TENANTS[number % len(TENANTS)], MODELS[number // 5 % len(MODELS)]
        messages = self._write_messages(f"{tenant}-{model}", request)
        body: dict[str, Any] = {"model": model, "messages": messages, "user": request.fault}
        if request.is_stream:
            body["stream"] = True
            if request.has_usage:
                body["stream_options"] = {"include_usage": True}
        headers = {"authorization": f"Bearer {tenant}"}
        if not request.is_small or number % 10:  # some small requests name no session
            headers["x-session-id"] = f"{'small-' if request.is_small else ''}{tenant}-{model}"
        with suppress(httpx.RemoteProtocolError):  # a cut answer stays cut
            answer = client.post("/v1/chat/completions", json=body, headers=headers)
            expected = {"429": 429, "503": 503, "unanswered": 502}.get(request.fault, 200)
            assert answer.status_code == expected, answer.text
        if request.fault == "unanswered" or (
            request.is_small
            and request.fault not in {"429", "503"}
            and (request.fault or not request.has_usage)
        ):
            self.uncounted += 1
        elif request.fault not in {"429", "503"}:
            self.sent_tokens += count_tokens(messages)
        if request.fault != "cut":
            self.small += answer.headers.get("x-compaction-reason") == "small"

    def _write_messages(self, conversation: str, request: Request) -> list[dict[str, Any]]:
        """A question of its own, or the next turn of a conversation."""
        if request.is_small:
            number = request.number
            return [{"role": "user", "content": f"{write_words(SMALL_WORDS, number)} {number}"}]
        self._turns[conversation] += 1
        messages = [{"role": "user", "content": f"{conversation} {write_words(FIRST_WORDS, 1)}"}]
        for turn in range(self._turns[conversation]):
            messages += [
                {"role": "assistant", "content": f"{write_words(TURN_WORDS, turn)} {turn}"},
                {"role": "user", "content": f"{write_words(TURN_WORDS, turn + 3)} {turn}"},
            ]
        return messages


def read_page(client: httpx.Client, path: str) -> str:
    """The text of a page."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", client.get(path).text)).split())


def format_dollars(amount: float) -> str:
    digits = 2 if abs(amount) >= 1 or amount == 0 else 4
    return f"{'-' if amount < 0 else ''}${abs(amount):,.{digits}f}"


def sum_metrics(text: str) -> dict[str, float]:
    """Sums over all labels by name, without the common beginning; `:input` and such behind a direction."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^compaction_proxy_(\w+)(\{.*\})? (\S+)$", text, re.MULTILINE):
        direction = re.search(r'direction="(\w+)"', labels)
        key = f"{name}:{direction[1]}" if direction else name
        found[key] = found.get(key, 0) + float(value)
    return found


@pytest.fixture
def bill() -> Bill:
    return Bill()


@pytest.fixture
def proxy(tmp_path: Path, bill: Bill) -> Iterator[Proxy]:
    provider = Provider(bill)
    with run_proxy(tmp_path, provider.url, CONFIG) as running:
        yield running
    provider.close()


def test_all_surfaces_tell_the_sums_of_mixed_traffic_as_the_provider_bills_them(
    proxy: Proxy, bill: Bill
) -> None:
    requests, client = list_requests(), Client(proxy)
    assert sum(each.is_small for each in requests) == 0.6 * REQUESTS
    faults = Counter(each.fault for each in requests if each.fault)
    assert (len(faults), faults.total()) == (4, 0.05 * REQUESTS)
    client.send_all(requests)

    with proxy.client() as admin:

        def get_total() -> Any:
            total = admin.get("/admin/v1/stats").json()["total"]
            return total["requests"] == REQUESTS and total

        total = proxy.wait_for(get_total, "all requests are counted")
        by = {
            name: admin.get("/admin/v1/stats", params={"by": name}).json()["rows"]
            for name in ("model", "key", "hour")
        }
        exported = list(csv.DictReader(io.StringIO(admin.get("/admin/v1/export.csv?of=stats&by=model").text)))
        metrics = sum_metrics(admin.get("/metrics").text)
        overview = read_page(admin, "/ui")
    table, told, shared = [
        proxy.run_command("", "savings", "--by", "total", *options).stdout
        for options in ((), ("--json",), ("--share",))
    ]

    check_against_bill(total, client, bill)
    assert json.loads(told)["total"] == total
    assert (len(by["model"]), len(by["key"])) == (len(MODELS), len(TENANTS))
    check_metrics(metrics, total)
    names = [
        name for name in total if isinstance(total[name], int | float) and not name.startswith("overhead")
    ]
    for rows in (*by.values(), exported):
        for name in set(names) - {"last_at"}:
            assert sum(float(row[name]) for row in rows) == pytest.approx(total[name], abs=DOLLAR_ERROR)
        assert max(float(row["last_at"]) for row in rows) == total["last_at"]
    check_texts(total, overview, table, shared)


def check_against_bill(total: dict[str, Any], client: Client, bill: Bill) -> None:
    """What providers counted is summed up to the token; the rest is estimated, or told to be missing."""
    said = [call for call in bill.of_requests() if call.is_told]
    summaries = bill.of_summaries()
    read = total["tokens_after"] + total["summary_prompt_tokens"]
    assert read == pytest.approx(sum(call.prompt for call in bill.calls), rel=SHARE)
    assert total["tokens_before"] == pytest.approx(client.sent_tokens, rel=SHARE)
    assert total["net_tokens"] == total["tokens_before"] - read
    assert total["rounds"] >= len(MODELS) * len(TENANTS)
    assert {name: total[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")} == {
        "prompt_tokens": sum(call.prompt for call in said),
        "completion_tokens": sum(call.completion for call in said),
        "cached_tokens": sum(call.cached for call in said),
    }
    assert (total["summary_calls"], total["summary_prompt_tokens"]) == (
        len(summaries), sum(call.prompt for call in summaries),
    )  # fmt: skip
    assert total["cost_usd"] == pytest.approx(sum(call.dollars for call in said), abs=DOLLAR_ERROR)
    assert total["summary_usd"] == pytest.approx(sum(call.dollars for call in summaries), abs=DOLLAR_ERROR)
    assert (total["uncounted"], total["unpriced_summary_calls"]) == (client.uncounted, 0)


def check_metrics(metrics: dict[str, float], total: dict[str, Any]) -> None:
    names = {
        "requests_total": "requests",
        "tokens_before_total": "tokens_before",
        "tokens_after_total": "tokens_after",
        "requests_uncounted_total": "uncounted",
        "requests_unpriced_total": "unpriced",
        "input_tokens_total": "prompt_tokens",
        "output_tokens_total": "completion_tokens",
        "cached_input_tokens_total": "cached_tokens",
        "runs_total": "rounds",
        "summary_tokens_total:input": "summary_prompt_tokens",
        "summary_tokens_total:output": "summary_completion_tokens",
        "requests_cost_usd_total": "cost_usd",
        "saved_cost_usd_total": "gross_usd",
        "cache_loss_cost_usd_total": "cache_loss_usd",
        "summary_cost_usd_total": "summary_usd",
    }
    for metric, name in names.items():
        assert metrics[metric] == pytest.approx(total[name], abs=DOLLAR_ERROR), metric
    assert metrics["tokens_removed_total"] == total["tokens_before"] - total["tokens_after"]
    assert metrics["last_request_timestamp_seconds"] == pytest.approx(total["last_at"], abs=0.001)


def check_texts(total: dict[str, Any], overview: str, table: str, shared: str) -> None:
    sent, saved = total["tokens_before"], total["net_tokens"]
    read, less = f"{sent - saved:,}", f"{saved / sent:.0%}".replace("%", " %")
    counted, priced = (f"{REQUESTS - total[name]:,}" for name in ("uncounted", "unpriced"))
    money = {name: format_dollars(total[f"{name}_usd"]) for name in ("net", "gross", "cache_loss", "summary")}

    assert f"Providers read {less} less than clients sent, summary calls included" in overview
    for known in (counted, priced):
        assert f"Covers {known} of {REQUESTS} requests. For the others," in overview
    rows = re.findall(r"\d\d:00:00 (\d+) \d+ ([\d,]+) (?:of \d+ requests )?([\d,]+) [\d,]+ \d+", overview)
    columns = [sum(int(value.replace(",", "")) for value in column) for column in zip(*rows, strict=True)]
    assert columns == [REQUESTS, sent, sent - saved]

    [_, line] = [each for each in table.splitlines() if each.startswith("total ")]  # below the titles
    told = [str(REQUESTS), counted, f"{sent:,}", read, f"{saved:,}", *less.split()]
    assert line.split()[1:8] == told
    assert f"the tokens exclude {total['uncounted']} of {REQUESTS} requests, because" in table
    assert f"the dollars exclude {total['unpriced']} of {REQUESTS} requests, because" in table

    assert f"{REQUESTS} requests, {total['rounds']} compactions" in shared
    assert f"{sent:,} tokens sent, {read} read including summaries ({less} less)" in shared
    assert f", of {counted} of {REQUESTS} requests" in shared
    assert (
        f"{money['net']} net saved: {money['gross']}, minus {money['cache_loss']} for cache misses and "
        f"{money['summary']} for summaries, of {priced} of {REQUESTS} requests"
    ) in shared
    [stamp] = re.findall(r" to (\S+)Z, the time of the latest", table)
    assert f"up to {stamp}Z" in shared
    assert stamp.partition("T")[2] in overview
