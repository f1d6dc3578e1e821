"""One replay and everybody who tells of it; and what was saved, by the bills of the provider."""

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compaction_proxy.cli.demo.provider import DemoProvider, DemoProviderSettings
from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.replay.provider import SimulatedProvider
from compaction_proxy.support import formatting
from tests.conftest import Proxied
from tests.helpers.proxy_processes import command, proxy_process

MODEL, WRITER = "gpt-4o", "gpt-4o-summary"
WINDOW = 2_000_000  # so that everything can be asked uncompacted, too
PRICES = {
    MODEL: {"input": 2.5, "cached": 0.25, "output": 10.0},
    WRITER: {"input": 0.5, "cached": 0.05, "output": 2.0},
}
MODELS = {name: {"window": WINDOW, "prices": prices} for name, prices in PRICES.items()}
RECORDED = Path(__file__).parents[2] / "fixtures" / "conversations.jsonl"
TRIGGER = [{"tokens": 2_500}]
DOLLAR_ERROR = 1e-9
PATIENCE_S = 60.0

Conversation = dict[str, Any]


class Call(NamedTuple):
    """What the provider has counted of one request, and charges for."""

    model: str
    prompt: int
    cached: int
    completion: int

    @property
    def dollars(self) -> float:
        row = PRICES[self.model]
        price = ModelPrice((PriceTier(0, row["input"], row["cached"], row["input"], row["output"]),), "")
        return price.compute_cost(self.prompt, self.cached, self.completion)


class Provider:
    """The scripted provider, which caches blocks of 128 tokens, and what it has said to have counted.

    Args:
        scale: Tokens of it for each that the proxy would count.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._exact = TiktokenCounter(lambda _: None)
        self._scale = scale
        self._app: ASGIApp = DemoProvider(DemoProviderSettings(self, window=WINDOW, models=(MODEL, WRITER)))
        self.calls: list[Call] = []

    def count(self, text: str, model: str) -> int:
        return round(self._scale * self._exact.count(text, model))

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        return [self.count(text, model) for text in texts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said: list[bytes] = []

        async def heard(message: Message) -> None:
            said.append(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, heard)
        if scope["type"] == "http" and scope["path"].endswith("/chat/completions"):
            told = json.loads(b"".join(said))
            used, cached = told["usage"], told["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.calls.append(Call(told["model"], used["prompt_tokens"], cached, used["completion_tokens"]))

    def of(self, model: str) -> list[Call]:
        return [call for call in self.calls if call.model == model]


def dollars(calls: Iterable[Call]) -> float:
    return sum(call.dollars for call in calls)


def recorded(name: str, path: Path = RECORDED) -> Conversation:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return next(each for each in lines if each["id"] == name)


async def play(client: httpx.AsyncClient, conversation: Conversation, every: int = 1) -> None:
    """Ask for each of its assistant messages, or every so many."""
    messages = conversation["messages"]
    tools = {"tools": conversation["tools"]} if conversation.get("tools") else {}
    client.headers.update({"authorization": "Bearer sk-test", "x-session-id": "replay"})
    for length in [n for n, each in enumerate(messages) if n and each["role"] == "assistant"][::every]:
        body = {"model": MODEL, "messages": messages[:length], "max_tokens": 16, **tools}
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()


async def told(client: httpx.AsyncClient, path: str) -> Any:
    return (await client.get(f"/admin/v1/{path}")).raise_for_status().json()


def total(rows: Iterable[dict[str, Any]], *names: str) -> dict[str, float]:
    """The sums of these fields, and the number of rows."""
    listed = list(rows)
    return {"number": len(listed), **{name: sum(row.get(name, 0) for row in listed) for name in names}}


def agree(said: dict[str, float], known: dict[str, float]) -> None:
    """Counts are the same; dollars but for the error of adding them up."""
    assert {name: said[name] for name, value in known.items() if isinstance(value, int)} == {
        name: value for name, value in known.items() if isinstance(value, int)
    }
    for name, value in known.items():
        assert said[name] == pytest.approx(value, abs=DOLLAR_ERROR), name


def shown(html: str) -> str:
    """What a page shows, with single spaces."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def metrics(text: str) -> dict[str, float]:
    """Samples by name, those of all labels together; of those with a direction each."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            labelled, _, value = line.rpartition(" ")
            direction = re.search(r'direction="(\w+)"', labelled)
            name = labelled.partition("{")[0] + (f":{direction[1]}" if direction else "")
            found[name] = found.get(name, 0) + float(value)
    return found


class Truth(NamedTuple):
    """What the provider knows of a replay."""

    used: dict[str, float]  # of the conversation's own requests
    written: dict[str, float]  # of summaries


def truth(provider: Provider) -> Truth:
    asked, writing = provider.of(MODEL), provider.of(WRITER)
    used = {
        "requests": len(asked),
        "prompt_tokens": sum(call.prompt for call in asked),
        "completion_tokens": sum(call.completion for call in asked),
        "cached_tokens": sum(call.cached for call in asked),
        "cost_usd": dollars(asked),
    }
    written = {
        "summary_calls": len(writing),
        "summary_prompt_tokens": sum(call.prompt for call in writing),
        "summary_completion_tokens": sum(call.completion for call in writing),
        "summary_usd": dollars(writing),
    }
    return Truth(used, written)


def told_of_rounds(events: list[dict[str, Any]], known: Truth) -> int:
    """How many rounds these events tell of; their calls cost what the provider charged for them."""
    rounds = [each for each in events if each.get("kind", "compacted") == "compacted"]
    names = ("calls", "prompt_tokens", "completion_tokens", "cost_usd")
    agree(total(rounds, *names), dict(zip(names, known.written.values(), strict=True)))
    return len(rounds)


async def test_everybody_tells_the_same_of_a_replay(tmp_path: Path) -> None:
    environ = {
        "COMPACTION_PROXY__MODELS": json.dumps(MODELS),
        "COMPACTION_PROXY__COMPACTION__TRIGGER": json.dumps(TRIGGER),
        "COMPACTION_PROXY__COMPACTION__BACKGROUND": "false",  # nothing goes on behind the last answer
        "COMPACTION_PROXY__SUMMARY__MODEL": WRITER,
        "COMPACTION_PROXY__STORE__URL": "memory://",
    }
    provider = Provider()
    async with (
        serve_embedded(provider) as upstream,
        proxy_process(
            tmp_path, int(upstream.rpartition(":")[2]), environ=environ, admin_key="none"
        ) as process,
        httpx.AsyncClient(base_url=process.url, timeout=60, trust_env=False) as client,
    ):
        await play(client, recorded("sweagent-crypto-eps"))
        counted = metrics((await client.get("/metrics")).text)
        stats = (await told(client, "stats"))["total"]
        [row] = (await told(client, "conversations"))["conversations"]
        path = f"conversations/{row['id']}"
        seen, exchanges, compactions = [
            await told(client, each) for each in (path, f"{path}/exchanges", f"{path}/compactions")
        ]
        overview, page = [shown((await client.get(f"/ui{each}")).text) for each in ("", f"/{path}")]
        at = ("--json", "--url", process.url)
        savings, show = await asyncio.gather(
            *(
                asyncio.to_thread(command, " ".join((*asked, *at)), tmp_path)
                for asked in (("savings", "--since", "1h"), ("sessions", "show", row["id"]))
            )
        )

    known = truth(provider)
    rounds = told_of_rounds(process.events("compaction.finished"), known)
    assert rounds == told_of_rounds(compactions["compactions"], known) == 4
    money = {name: stats[name] for name in ("gross_usd", "cache_loss_usd", "net_usd")}
    assert money["net_usd"] == pytest.approx(
        money["gross_usd"] - money["cache_loss_usd"] - known.written["summary_usd"], abs=DOLLAR_ERROR
    )
    agree(stats, {**known.used, **known.written, "rounds": rounds, "unpriced": 0})
    agree(row, {**known.used, "rounds": rounds, "net_usd": money["net_usd"]})
    agree({**seen["totals"], **seen["money"]}, {**known.used, **money, "rounds": rounds})
    each = [{**line, **line["saving"]} for line in exchanges["exchanges"]]
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost", "gross", "cache_loss")
    assert stats["tokens_after"] == known.used["prompt_tokens"]
    removed = total(each, "tokens_before", "tokens_after")
    assert (
        stats["tokens_before"] - stats["tokens_after"] == removed["tokens_before"] - removed["tokens_after"]
    )
    agree(
        total(each, *names),
        {
            "number": int(known.used["requests"]),
            **dict(zip(names[:3], list(known.used.values())[1:4], strict=True)),
            "cost": known.used["cost_usd"],
            "gross": money["gross_usd"],
            "cache_loss": money["cache_loss_usd"],
        },
    )
    agree(
        counted,
        {
            "compaction_requests_total": known.used["requests"],
            "compaction_runs_total": rounds,
            "compaction_input_tokens_total": known.used["prompt_tokens"],
            "compaction_output_tokens_total": known.used["completion_tokens"],
            "compaction_cached_input_tokens_total": known.used["cached_tokens"],
            "compaction_tokens_before_total": stats["tokens_before"],
            "compaction_tokens_after_total": stats["tokens_after"],
            "compaction_summary_tokens_total:input": known.written["summary_prompt_tokens"],
            "compaction_summary_tokens_total:output": known.written["summary_completion_tokens"],
            "compaction_summary_duration_seconds_count": known.written["summary_calls"],
            "compaction_summary_cost_usd_total": known.written["summary_usd"],
            "compaction_requests_cost_usd_total": known.used["cost_usd"],
            "compaction_saved_cost_usd_total": money["gross_usd"],
            "compaction_cache_loss_cost_usd_total": money["cache_loss_usd"],
        },
    )
    assert (savings[0], json.loads(savings[1])["total"]) == (0, stats)
    assert (show[0], json.loads(show[1])) == (0, {"conversation": seen, **compactions})
    for text in (overview, page):
        for name in ("net_usd", "gross_usd", "cache_loss_usd", "summary_usd"):
            assert formatting.format_usd(stats[name]) in text
    assert f"in {rounds} compactions" in overview
    read = stats["tokens_after"] + stats["summary_prompt_tokens"]
    assert f"{stats['tokens_before']:,} {read:,} {stats['cached_tokens']:,}" in overview
    for line in exchanges["exchanges"]:
        assert " ".join(f"{line[name]:,}" for name in ("tokens_before", "tokens_after")) in page
    for event in compactions["compactions"]:
        assert formatting.format_usd(event["cost_usd"]) in page


async def settled(client: httpx.AsyncClient, provider: Provider) -> dict[str, Any]:
    """The statistics, once what is prepared behind the last answer is told: its summary is charged, too."""
    before, told_of = -1, -1
    async with asyncio.timeout(PATIENCE_S):
        while not before == told_of == len(provider.of(WRITER)):
            before = len(provider.of(WRITER))
            await asyncio.sleep(0.1)
            await client.get("/metrics")
            stats: dict[str, Any] = (await told(client, "stats"))["total"]
            told_of = stats["summary_calls"]
    return stats


async def net(
    proxied: Proxied, conversation: Conversation, scale: float = 1.0, every: int = 1, **compaction: Any
) -> tuple[float, dict[str, Any]]:
    """Dollars that were saved by the provider's bills, and what our statistics say."""
    direct, through = Provider(scale), Provider(scale)
    async with (
        serve_embedded(direct) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
    ):
        await play(client, conversation, every)
    sections = {"models": MODELS, "compaction": compaction, "summary": {"model": WRITER}}
    async with serve_embedded(through) as upstream, proxied(upstream, **sections) as client:
        await play(client, conversation, every)
        stats = await settled(client, through)
    return dollars(direct.calls) - dollars(through.calls), stats


@pytest.mark.parametrize("provider", ["caches", "caches nothing"])
@pytest.mark.parametrize("strategy", ["anchored", "selective", "chained"])
async def test_our_net_saving_is_that_of_the_provider_s_bills(
    strategy: str, provider: str, proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider == "caches nothing":
        monkeypatch.setattr(SimulatedProvider, "count_and_cache_prompt", lambda *_: 0)
    conversation = recorded("sweagent-crypto-eps")
    charged, stats = await net(proxied, conversation, strategy=strategy, trigger=TRIGGER)

    assert stats["rounds"] > 0
    assert stats["net_usd"] == pytest.approx(charged, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scale", [0.8, 1.0, 1.3])
@pytest.mark.parametrize(
    ("name", "tokens", "every"),
    [
        ("coding_openhands/openhands-ponylang__ponyc-4595", 10_000, 1),
        ("memory_qa/locomo-conv-41", 8_000, 4),
        ("bfcl_multi_turn/bfcl-multi_turn_long_context_116", 12_000, 1),
    ],
)
async def test_so_it_is_of_long_conversations_and_where_the_provider_counts_otherwise(
    name: str, tokens: int, every: int, scale: float, shared: Path, proxied: Proxied
) -> None:
    """Where it counts otherwise, what it was never sent can only be estimated: to 1 % of the gross saving."""
    file, _, which = name.partition("/")
    conversation = recorded(which, shared / "data" / "conversations" / f"{file}.jsonl")
    for strategy in ("anchored", "selective", "chained"):
        row = {"strategy": strategy, "trigger": [{"tokens": tokens}]}
        charged, stats = await net(proxied, conversation, scale, every, **row)
        measure = abs(charged) if scale == 1.0 else max(abs(charged), stats["gross_usd"])
        print(f"{which} {strategy} x{scale}: {stats['rounds']} rounds, {charged:.5f} {stats['net_usd']:.5f}")  # noqa: T201
        assert stats["net_usd"] == pytest.approx(charged, abs=0.01 * measure)
