"""The admin API in figures: conversations, their exchanges and rounds, statistics, models, exports."""

import csv
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import AdminApi, AdminSettings
from compaction_proxy.admin.app import create_admin_app
from compaction_proxy.admin.auth import AccessPolicy
from compaction_proxy.admin.health import Readiness
from compaction_proxy.config.config import Config
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.event import COMPACTED, FAILED, Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.telemetry.event_history import build_round_event_line
from compaction_proxy.telemetry.usage import ExchangeEntry
from tests.helpers.watched import ORIGIN, Watched

NOW, DAY_S = 1_800_000_000.0, 86_400.0
ONE, TWO = "c_0123456789abcdef01234567", "c_76543210fedcba9876543210"
ROOT, PLACE = bytes(32), bytes(63) + b"\1"
SETTINGS = AdminSettings(
    Config(server=ServerSection(admin_key=SecretStr("sk-hidden"))),
    {"server.admin_key": "environment NAME"},
    "config.yaml",
    ("think twice",),
)


def exchange(at: float, model: str = "gpt-x", **figures_: Any) -> Exchange:
    told = {"tokens_before": 1_000, "tokens_after": 400, "prompt_tokens": 400, "completion_tokens": 10}
    return Exchange(at, model, "reused", 200, **{**told, **figures_})


@asynccontextmanager
async def looked_at() -> AsyncIterator[tuple[Watched, httpx.AsyncClient]]:
    """Two conversations, one of them of a model without a price; a round, a failure."""
    here = Watched(MemoryStore(), 30 * DAY_S, lambda: NOW, models={"gpt-small": {"window": 9_000}})
    for name, model in ((ONE, "gpt-x"), (TWO, "=cheap")):
        await here.owners.record_activity("t_1", name)
        here.journal.record_exchange("t_1", name, ORIGIN, exchange(NOW - 60, model, window=77_000))
    made = Event(
        COMPACTED, NOW - 50, ONE, id="e_1", round=1, place=PLACE.hex(), tokens_before=1_000, tokens_after=400,
        calls=1, cost_usd=0.0001, summary="a secret", message_ids=("m_1",),
    )  # fmt: skip
    failed = Event(FAILED, NOW - 40, ONE, id="e_2", reason="timeout")
    told = build_round_event_line("t_1", ROOT, made, DAY_S)
    await here.history.record_root("t_1", ONE, ROOT)
    await here.records.save_if_absent(f"{told.key}:x", {}, ttl_s=DAY_S, other_items=[told])
    await here.history.record_event("t_1", failed)
    for event in (made, failed):
        for hear in (here.statistics.on_event, here.accounts.on_event, here.feed.on_event):
            hear("t_1", event)
    await here.journal.flush()
    ready = Readiness(ready=True, store="ok", version="1")
    api = AdminApi(here.steering, here.watching, here.replaying, AccessPolicy("127.0.0.1", "none"), SETTINGS)
    transport = httpx.ASGITransport(create_admin_app(lambda: ready, "", api), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/admin/v1") as client:
        yield here, client
    await here.records.close()


async def got(client: httpx.AsyncClient, path: str, **query: Any) -> Any:
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_conversations_are_found_and_sorted_and_an_unknown_price_is_null() -> None:
    async with looked_at() as (_, client):
        by_net = (await got(client, "/conversations", sort="net"))["conversations"]
        found = (await got(client, "/conversations", q="CHEAP"))["conversations"]
        one = await got(client, f"/conversations/{ONE}")
    assert [(row["id"], row["cost_usd"] is None, row["net_usd"] is None) for row in by_net] == [
        (ONE, False, False),
        (TWO, True, True),
    ]
    assert [row["id"] for row in found] == [TWO]
    assert (by_net[0]["tokens_before"], by_net[0]["tokens_after"], by_net[0]["rounds"]) == (1_000, 400, 1)
    assert one["money"]["net_usd"] == pytest.approx(by_net[0]["net_usd"])
    assert one["money"]["summary_usd"] == 0.0001


async def test_exchanges_and_compactions_are_told_whole() -> None:
    async with looked_at() as (_, client):
        [exchanged] = (await got(client, f"/conversations/{ONE}/exchanges"))["exchanges"]
        [made] = (await got(client, f"/conversations/{ONE}/compactions"))["compactions"]
        shown = await got(client, f"/conversations/{ONE}/compactions/{PLACE.hex()}")
        absent = [
            (await client.get(f"/conversations/{ONE}/compactions/{place}")).status_code
            for place in ("00", "zz", bytes(64).hex())
        ]
    assert set(exchanged) == {*Exchange._fields, "saving"}
    assert set(exchanged["saving"]) == set(Saving._fields)
    assert (made["id"], made["undone"], made["summary"]) == ("e_1", False, "a secret")
    assert made["pays_back_after"] > 0
    assert shown == {**made, "removed": [], "prompts": [], "seen": []}
    assert absent == [404, 404, 404]


async def test_bypass_and_resume_are_seen_at_once() -> None:
    async with looked_at() as (_, client):
        on = (await client.post(f"/conversations/{ONE}/bypass")).json()
        between = (await got(client, f"/conversations/{ONE}"))["bypass"]
        off = (await client.post(f"/conversations/{ONE}/resume")).json()
        unknown = await client.post("/conversations/c_none/bypass")
    assert (on, between, off) == ({"id": ONE, "bypass": True}, True, {"id": ONE, "bypass": False})
    assert unknown.status_code == 404


async def test_statistics_add_up_and_say_what_is_not_known() -> None:
    async with looked_at() as (_, client):
        told = await got(client, "/stats", since="1h", by="model")
        day = await got(client, "/stats", since=f"{NOW - 60}", by="day")
        wrong = [await client.get("/stats", params={"since": since}) for since in ("1y", "-3", "x")]
    rows = {row["of"]: row for row in told["rows"]}
    assert (rows["=cheap"]["cost_usd"], rows["=cheap"]["net_usd"]) == (None, None)
    assert rows["gpt-x"]["cost_usd"] > 0
    for name in ("requests", "tokens_before", "rounds", "failures", "summary_calls"):
        assert told["total"][name] == sum(row[name] for row in told["rows"]), name
    assert (told["total"]["rounds"], told["total"]["failures"]) == (1, 1)
    assert [day["total"][name] for name in ("requests", "net_usd")] == [2, told["total"]["net_usd"]]
    assert (told["since"], told["until"], told["by"]) == (NOW - 3_600, NOW, "model")
    assert [(each.status_code, each.json()["error"]["message"]) for each in wrong] == [
        (422, "query.since: should be an age such as 90m, 24h or 7d, or seconds since 1970")
    ] * 3


async def test_the_last_events_carry_no_text() -> None:
    async with looked_at() as (_, client):
        events = (await got(client, "/events"))["events"]
        failures = (await got(client, "/events", failures="true"))["events"]
    assert [event["id"] for event in events] == ["e_2", "e_1"]
    assert [event["id"] for event in failures] == ["e_2"]
    assert all(event["feed"] and {"summary", "message_ids"}.isdisjoint(event) for event in events)


async def test_models_are_those_configured_and_those_seen() -> None:
    async with looked_at() as (_, client):
        models = {row["model"]: row for row in (await got(client, "/models"))["models"]}
    assert set(models) == {"gpt-small", "gpt-x", "=cheap"}
    assert (models["gpt-small"]["window"], models["gpt-small"]["window_source"]) == (9_000, "configured")
    assert (models["gpt-x"]["window"], models["gpt-x"]["window_source"]) == (77_000, "learned")
    prices = [models["gpt-x"][f"{name}_usd"] for name in ("input", "cached", "output")]
    assert (prices, models["gpt-x"]["surcharge_tokens"]) == ([2.0, 0.5, 8.0], 200_000)
    assert (models["=cheap"]["input_usd"], models["=cheap"]["price_source"]) == (None, None)


async def test_the_configuration_is_shown_with_its_origins_and_no_secret() -> None:
    async with looked_at() as (_, client):
        answer = await client.get("/config")
    told = answer.json()
    values = {each["key"]: each for each in told["values"]}
    assert values["server.admin_key"] == {
        "key": "server.admin_key", "value": "********", "origin": "environment NAME",
    }  # fmt: skip
    assert (told["path"], told["warnings"]) == ("config.yaml", ["think twice"])
    assert values["server.port"]["origin"] == "default"
    assert "sk-hidden" not in answer.text


async def test_exports_agree_with_what_is_shown() -> None:
    async with looked_at() as (_, client):
        document = await got(client, "/export.json")
        sheet = await client.get("/export.csv")
        daily = await client.get("/export.csv", params={"of": "stats"})
        listed = (await got(client, "/conversations"))["conversations"]
        total = (await got(client, "/stats"))["total"]
    assert [{name: each[name] for name in listed[0]} for each in document["conversations"]] == listed
    assert "a secret" not in str(document)
    assert [len(each["exchanges"]) for each in document["conversations"]] == [1, 1]
    rows = list(csv.DictReader(io.StringIO(sheet.text)))
    assert {row["conversation"]: row["model"] for row in rows} == {ONE: "gpt-x", TWO: "'=cheap"}
    assert {row["conversation"]: bool(row["saving_cost"]) for row in rows} == {ONE: True, TWO: False}
    [day] = csv.DictReader(io.StringIO(daily.text))
    assert (int(day["requests"]), float(day["net_usd"])) == (total["requests"], total["net_usd"])
    assert sheet.headers["content-disposition"] == 'attachment; filename="exchanges.csv"'


async def test_a_store_that_is_away_is_said_to_be() -> None:
    class Away(MemoryStore):
        async def read(self, keys: Any) -> Any:
            raise OSError("gone")

    here = Watched(Away(), DAY_S)
    api = AdminApi(here.steering, here.watching, here.replaying, AccessPolicy("127.0.0.1", "none"))
    app = create_admin_app(lambda: Readiness(ready=True, store="down", version="1"), "", api)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    paths = (
        "conversations", "stats", "events", "events/stream", "models", "export.json", "export.csv",
        f"conversations/{ONE}/exchanges", f"conversations/{ONE}/compactions",
    )  # fmt: skip
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/admin/v1") as client:
        statuses = {path: (await client.get(path)).status_code for path in paths}
    await here.records.close()
    assert set(statuses.values()) == {503}, statuses


def test_an_exchange_without_a_price_says_so() -> None:
    assert schemas.to_exchange_line(ExchangeEntry("t", None, exchange(1.0), None))["saving"] is None


def misdescribed(value: Any, schema: dict[str, Any], schemas: dict[str, Any], place: str) -> list[str]:
    """The places in an answer whose fields are others than described."""
    schema = next((each for each in schema.get("anyOf", ()) if each.get("type") != "null"), schema)
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(value, list):
        return [
            w for each in value for w in misdescribed(each, schema.get("items", {}), schemas, f"{place}[]")
        ]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    if value.keys() != schema["properties"].keys():
        return [f"{place}: {sorted(value.keys() ^ schema['properties'].keys())}"]
    described = schema["properties"].items()
    return [
        w for name, each in described for w in misdescribed(value[name], each, schemas, f"{place}.{name}")
    ]


async def test_every_answer_has_the_fields_that_are_described() -> None:
    given = {"conversation": ONE, "place": PLACE.hex(), "message": "m_1"}
    wrong, seen = [], []
    async with looked_at() as (_, client):
        document = await got(client, "/openapi.json")
        for path, methods in document["paths"].items():
            shown = methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
            if described := shown.get("application/json", {}).get("schema"):
                answer = await client.get(path.format(**given).removeprefix("/admin/v1"), params={"q": "x"})
                if answer.status_code == 200:
                    seen.append(path)
                    wrong += misdescribed(answer.json(), described, document["components"]["schemas"], path)
    # The latest events are told as they were stored: without what is unknown, and with a version.
    assert [each for each in wrong if not each.startswith("/admin/v1/events.events[]:")] == []
    assert len(seen) >= 14
