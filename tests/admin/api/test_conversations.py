"""The admin API over a store in which a conversation has two rounds."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from compaction_proxy.admin.api.routing import AdminApi
from compaction_proxy.admin.app import create_admin_app
from compaction_proxy.admin.auth import AccessPolicy
from compaction_proxy.admin.health import Readiness
from compaction_proxy.compaction.directives import MAX_PINS, Directives, build_pin_id
from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.recall import fulltext
from compaction_proxy.recall.archive import ArchivedRound, OriginalMessage, build_archive
from compaction_proxy.storage.keys import checkpoint_list_key
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import ListItem
from compaction_proxy.telemetry.event_history import build_round_event_line
from compaction_proxy.telemetry.usage import ExchangeEntry, UsageStore
from tests.helpers.watched import Watched

DAY_S = 86_400.0
TENANT, NAME = "t_1", "c_0123456789abcdef01234567"
PATH = f"/admin/v1/conversations/{NAME}"
ROOT = bytes(32)
ASKED = Exchange(
    7.0, "gpt", "none", 200, request_bytes=500, prompt_tokens=100, completion_tokens=10, cached_tokens=60
)
# What totals say besides of a request that was not read, and whose price is not known.
UNPRICED = {
    "status": "none", "strategy": "", "label": "", "name": "", "title": "", "failed": 0, "failure": "",
    "recalls": 0, "rounds": 0,
    "priced": 0, "cost_usd": 0.0, "gross_usd": 0.0, "cache_loss_usd": 0.0, "summary_usd": 0.0,
    "tokens_before": None, "tokens_after": None, "trigger": None,
    "window": None,
}  # fmt: skip
KEY = "secret"


def ignored(_: object) -> None:
    """Failures of a store that the test makes fail on purpose."""


def place(number: int) -> bytes:
    return number.to_bytes(64, "big")


class Faulty(MemoryStore):
    """A store that can be away."""

    away = False

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        if self.away:
            raise OSError("gone")
        return await super().read(keys)


@dataclass
class Place:
    """An admin application and what is behind it."""

    store: Faulty = field(default_factory=Faulty)

    def __post_init__(self) -> None:
        watched = Watched(self.store, DAY_S)
        self.records, self.owners, self.history = watched.records, watched.owners, watched.history
        self.wishing, self.steering, self.watching = watched.wishing, watched.steering, watched.watching
        self.journal, self.feed, self.replaying = watched.journal, watched.feed, watched.replaying

    def client(self, *, key: str = "none", base_path: str = "", peer: str = "127.0.0.1") -> httpx.AsyncClient:
        ready = Readiness(ready=True, store="ok", version="1")
        api = AdminApi(self.steering, self.watching, self.replaying, AccessPolicy("127.0.0.1", key))
        app = create_admin_app(lambda: ready, base_path, api)
        transport = httpx.ASGITransport(app, client=(peer, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost:4141")

    async def round(self, number: int, *messages: Message) -> None:
        """What a round commits."""
        event = Event(
            COMPACTED,
            float(number),
            NAME,
            strategy="chained",
            round=number,
            place=place(number).hex(),
            reason="percent",
            model="small",
            tokens_before=1_000 * number,
            tokens_after=100 * number,
            messages=len(messages),
            summary="done",
        )
        await self.history.record_root(TENANT, NAME, ROOT)
        made = ArchivedRound(NAME, "chained", place(number), number, float(number))
        taken = [
            OriginalMessage(10 * number + index, f"m_{number}{index}", 1, each)
            for index, each in enumerate(messages)
        ]
        (item, *pieces), line, _ = build_archive(TENANT, ROOT, made, taken, DAY_S)
        told = build_round_event_line(TENANT, ROOT, event, DAY_S)
        listed = ListItem(checkpoint_list_key(TENANT, ROOT, "chained"), {"place": event.place}, DAY_S, 200)
        await self.records.save_if_absent(
            f"{item.key}:x", {}, ttl_s=DAY_S, other_items=[item, *pieces, line, told, listed]
        )


@asynccontextmanager
async def two_rounds(**settings: Any) -> AsyncIterator[tuple[Place, httpx.AsyncClient]]:
    """A conversation of two rounds and one request, and a client of its API."""
    here = Place()
    accounts = UsageStore(here.records, DAY_S)
    accounts.add_entry(NAME, ExchangeEntry(TENANT, NAME, ASKED, None), None)
    await accounts.flush()
    await here.owners.record_activity(TENANT, NAME)
    await here.round(1, Message("user", "The port is 4141."), Message("assistant", "Noted."))
    call = MessageToolCall("1", "read", '{"path": "port.txt"}')
    await here.round(
        2,
        Message("assistant", "", calls=(call,)),
        Message("tool", "port: 80 \ud83d", answered_call_ids=("1",)),
    )
    async with here.client(**settings) as client:
        yield here, client
    await here.records.close()


def round_of(number: int, *, undone: bool = False) -> dict[str, Any]:
    return {
        "strategy": "chained",
        "round": number,
        "at": float(number),
        "reason": "percent",
        "outcome": "",
        "model": "small",
        "messages": 2,
        "tokens_before": 1_000 * number,
        "tokens_after": 100 * number,
        "tokens_real": None,
        "undone": undone,
    }


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of an error that has OpenAI's shape."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


async def test_a_conversation_is_shown_with_its_totals_rounds_and_wishes() -> None:
    async with two_rounds() as (here, client):
        await here.wishing.add_pin(TENANT, NAME, "Use SI units.")
        answer = await client.get(PATH)
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert answer.json() == {
        "id": NAME,
        "totals": {
            "model": "gpt",
            "requests": 1,
            "request_bytes": 500,
            "prompt_tokens": 100,
            "completion_tokens": 10,
            "cached_tokens": 60,
            "last_at": 7.0,
            **UNPRICED,
            "counted": 1,
            "sent_tokens": 100,
            "read_tokens": 100,
            "summary_tokens": 0,
        },
        "rounds": [round_of(1), round_of(2)],
        "pins": [{"id": build_pin_id("Use SI units."), "text": "Use SI units."}],
        "instructions": [],
        "compact": False,
        "suppressed": False,
        "hard_tokens": None,
        "bypass": False,
        "money": None,
        "tokens": {"gross_tokens": 0, "summary_tokens": 0, "net_tokens": 0},
        "list_prices": True,
        "small_bytes": None,
        "min_trigger": None,
    }


async def test_a_conversation_that_has_only_been_seen_is_empty() -> None:
    here = Place()
    await here.owners.record_activity(TENANT, NAME)
    async with here.client() as client:
        told = (await client.get(PATH)).json()
    assert (told["totals"]["requests"], told["rounds"], told["pins"]) == (0, [], [])


async def test_compact_marks_the_conversation_and_its_history() -> None:
    async with two_rounds() as (here, client):
        answer = await client.post(f"{PATH}/compact")
        assert (answer.status_code, answer.json()) == (202, {"id": NAME, "compact": True})
        assert await here.wishing.get(TENANT, NAME) == Directives(compact=True)
        events = (await client.get(f"{PATH}/events")).json()["events"]
    assert [(event["kind"], event["at"]) for event in events] == [
        ("compacted", 1.0),
        ("compacted", 2.0),
        ("marked", 50.0),
    ]
    assert events[0]["summary"] == "done"


async def test_undo_takes_the_newest_rounds_back_one_by_one() -> None:
    async with two_rounds() as (here, client):
        answers = [await client.post(f"{PATH}/undo") for _ in range(3)]
        left: dict[str, Any] = {"dropped": [], "hard_tokens": None}
        assert [answer.json() for answer in answers[:2]] == [
            {**round_of(2, undone=True), **left, "remaining": 1, "remaining_strategy": "chained"},
            {**round_of(1, undone=True), **left, "remaining": None, "remaining_strategy": None},
        ]
        assert error_of(answers[2]) == (409, "nothing_to_undo")
        assert await here.wishing.get(TENANT, NAME) == Directives(
            undone=(place(2), place(1)), suppressed=True
        )
        told = (await client.get(PATH)).json()
        assert (told["rounds"], told["suppressed"]) == (
            [round_of(1, undone=True), round_of(2, undone=True)],
            True,
        )
        kinds = [event["kind"] for event in (await client.get(f"{PATH}/events")).json()["events"]]
        assert kinds == ["compacted", "compacted", "undone", "undone"]


async def test_undo_takes_the_newest_round_in_use_and_drops_the_prepared_one() -> None:
    async with two_rounds() as (here, client):
        ahead = Event(COMPACTED, 3.0, NAME, round=3, place=place(3).hex(), outcome="scheduled")
        told = build_round_event_line(TENANT, ROOT, ahead, DAY_S)
        await here.records.save_if_absent(f"{told.key}:ahead", {}, ttl_s=DAY_S, other_items=[told])
        before = (await client.get(f"{PATH}/compactions")).json()["compactions"]
        answer = (await client.post(f"{PATH}/undo")).json()
        after = (await client.get(f"{PATH}/compactions")).json()["compactions"]
    assert [(each["round"], each["state"]) for each in before] == [
        (1, "followed"),
        (2, "in-use"),
        (3, "prepared"),
    ]
    assert (answer["round"], answer["dropped"], answer["remaining"]) == (2, [3], 1)
    assert [(each["round"], each["state"], each["undone"]) for each in after] == [
        (1, "in-use", False),
        (2, "undone", True),
        (3, "undone", True),
    ]


async def test_redo_applies_undone_rounds_again_the_last_one_first() -> None:
    async with two_rounds() as (here, client):
        assert error_of(await client.post(f"{PATH}/redo")) == (409, "nothing_to_redo")
        for _ in range(2):
            await client.post(f"{PATH}/undo")
        first = await client.post(f"{PATH}/redo")
        assert first.json() == round_of(1, undone=False)
        assert await here.wishing.get(TENANT, NAME) == Directives(undone=(place(2),), suppressed=True)
        second = await client.post(f"{PATH}/redo")
        assert second.json() == round_of(2, undone=False)
        assert await here.wishing.get(TENANT, NAME) == Directives()
        assert error_of(await client.post(f"{PATH}/redo")) == (409, "nothing_to_redo")
        kinds = [event["kind"] for event in (await client.get(f"{PATH}/events")).json()["events"]]
    assert kinds[-4:] == ["undone", "undone", "redone", "redone"]


async def test_pins_come_and_go() -> None:
    async with two_rounds() as (_, client):
        first = await client.post(f"{PATH}/pins", json={"text": " Use SI units. "})
        second = await client.post(f"{PATH}/pins", json={"text": "Größe zählt"})
        again = await client.post(f"{PATH}/pins", json={"text": "Use SI units."})
        pins = (await client.get(f"{PATH}/pins")).json()["pins"]
        gone = await client.delete(f"{PATH}/pins/{pins[0]['id']}")
        missing = await client.delete(f"{PATH}/pins/{pins[0]['id']}")
        kinds = [event["kind"] for event in (await client.get(f"{PATH}/events")).json()["events"]]
    assert [pin["text"] for pin in pins] == ["Use SI units.", "Größe zählt"]
    assert (first.status_code, second.json(), again.json()) == (201, {"pins": pins}, {"pins": pins})
    assert (gone.status_code, gone.json()) == (200, {"pins": pins[1:]})
    assert error_of(missing) == (404, "pin_not_found")
    assert kinds == ["compacted", "compacted", "pinned", "pinned", "unpinned"]


@pytest.mark.parametrize("text", ["", " ", "a\nb", "x" * 2_001])
async def test_what_is_no_pin_is_refused(text: str) -> None:
    async with two_rounds() as (_, client):
        assert error_of(await client.post(f"{PATH}/pins", json={"text": text})) == (422, "invalid_pin")


async def test_there_is_room_for_so_many_pins() -> None:
    async with two_rounds() as (here, client):
        for number in range(MAX_PINS):
            await here.wishing.add_pin(TENANT, NAME, str(number))
        answer = await client.post(f"{PATH}/pins", json={"text": "one more"})
        assert error_of(answer) == (409, "too_many_pins")


async def test_where_sqlite_cannot_search_that_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fulltext, "is_fts5_available", lambda: False)
    async with two_rounds() as (_, client):
        assert error_of(await client.get(f"{PATH}/search", params={"q": "port"})) == (
            501,
            "search_unavailable",
        )
        assert (await client.get(f"{PATH}/messages/m_21")).status_code == 200


async def test_what_was_taken_out_is_found_and_given_whole() -> None:
    async with two_rounds() as (_, client):
        asked = {"q": "port", "limit": "2"}
        hits = (await client.get(f"{PATH}/search", params=asked)).json()["hits"]
        alias = await client.get(f"/admin/v1/sessions/{NAME}/search", params=asked)
        everywhere = await client.get(f"{PATH}/search", params={**asked, "scope": "tenant"})
        whole = await client.get(f"{PATH}/messages/m_21")
        missing = await client.get(f"{PATH}/messages/m_99")
    assert [hit.pop("score") > 0 for hit in hits] == [True, True]
    assert hits == [
        {
            "message_id": f"m_2{index}",
            "index": 20 + index,
            "role": role,
            "round": 2,
            "strategy": "chained",
            "at": 2.0,
            "snippet": snippet,
            "conversation": NAME,
            "turn": 1,
        }
        for index, role, snippet in (
            (1, "tool", "port: 80 \ud83d"),
            (0, "assistant", 'read({"path": "port.txt"})'),
        )
    ]
    assert [hit["message_id"] for hit in alias.json()["hits"]] == ["m_21", "m_20"]
    assert everywhere.json() == {"hits": []}  # nothing of this place is in the tenant's list
    assert whole.json() == {
        "id": "m_21",
        "index": 21,
        "role": "tool",
        "text": "port: 80 \ud83d",
        "round": 2,
        "strategy": "chained",
        "at": 2.0,
        "conversation": NAME,
        "turn": 1,
        "lines": None,
    }
    assert error_of(missing) == (404, "message_not_found")


async def test_of_a_message_some_lines_are_given() -> None:
    async with two_rounds() as (here, client):
        text = "\n".join(f"line {number}" for number in range(1, 60))
        await here.round(3, Message("tool", text, answered_call_ids=("1",)))
        some = (await client.get(f"{PATH}/messages/m_30?lines=10-12")).json()
        rest = (await client.get(f"{PATH}/messages/m_30?lines=58-")).json()
        bad = [
            error_of(await client.get(f"{PATH}/messages/m_30?lines={each}")) for each in ("x", "60", "9-8")
        ]
    assert (some["text"], some["lines"]) == ("line 10\nline 11\nline 12", {"first": 10, "last": 12, "of": 59})
    assert (rest["text"], rest["lines"]) == ("line 58\nline 59", {"first": 58, "last": 59, "of": 59})
    assert bad == [(422, "invalid_request")] * 3


async def test_a_conversation_is_forgotten_whole_and_comes_back_when_it_is_used_again() -> None:
    async with two_rounds() as (here, client):
        await client.post(f"{PATH}/compact")
        answer = await client.delete(PATH)
        # two checkpoints, their archives of one piece each, lists of both and of rounds; totals, exchanges,
        # roots, events, mark
        assert (answer.status_code, answer.json()) == (200, {"deleted": 14})
        assert error_of(await client.get(PATH)) == (404, "conversation_not_found")
        await here.owners.record_activity(TENANT, NAME)
        told = (await client.get(PATH)).json()
        assert (told["rounds"], told["compact"], told["totals"]["requests"]) == ([], False, 0)


async def test_a_tenant_is_forgotten_whole_and_nobody_else() -> None:
    async with two_rounds() as (here, client):
        accounts = UsageStore(here.records, DAY_S)
        for tenant, name in ((TENANT, "c_other"), ("t_2", "c_foreign")):
            accounts.add_entry(name, ExchangeEntry(tenant, name, ASKED, None), None)
            await here.owners.record_activity(tenant, name)
        await accounts.flush()
        for name in (NAME, "c_other", "c_foreign"):
            await client.post(f"/admin/v1/conversations/{name}/pins", json={"text": "Stay."})

        answer = await client.delete(f"{PATH}/tenant")

        # as in the test above, but for its mark a pin; the other's totals, exchanges, wishes and events
        assert (answer.status_code, answer.json()) == (200, {"deleted": 18})
        assert error_of(await client.get(PATH)) == (404, "conversation_not_found")
        other, foreign = [
            await client.get(f"/admin/v1/conversations/{name}") for name in ("c_other", "c_foreign")
        ]
        assert error_of(other) == (404, "conversation_not_found")
        assert (foreign.json()["totals"]["requests"], len(foreign.json()["pins"])) == (1, 1)
        await here.owners.record_activity(TENANT, "c_other")
        again = (await client.get("/admin/v1/conversations/c_other")).json()
        assert (again["totals"]["requests"], again["pins"]) == (0, [])


async def test_an_export_has_all_that_is_kept() -> None:
    async with two_rounds() as (_, client):
        await client.post(f"{PATH}/pins", json={"text": "Stay."})
        exported = (await client.get(f"{PATH}/export")).json()
        assert exported["conversation"] == (await client.get(PATH)).json()
        assert exported["events"] == (await client.get(f"{PATH}/events")).json()["events"]
        ids = ["m_10", "m_11", "m_20", "m_21"]
        whole = [(await client.get(f"{PATH}/messages/{each}")).json() for each in ids]
        assert exported["messages"] == whole
        assert [each["text"] for each in whole[:2]] == ["The port is 4141.", "Noted."]


ROUTES = [
    ("GET", ""), ("DELETE", ""), ("GET", "/events"), ("POST", "/compact"), ("POST", "/undo"),
    ("GET", "/pins"), ("POST", "/pins"), ("DELETE", "/pins/p_1"), ("GET", "/search?q=x"),
    ("GET", "/messages/m_1"), ("GET", "/export"), ("DELETE", "/tenant"),
]  # fmt: skip


async def requested(client: httpx.AsyncClient, method: str, url: str) -> httpx.Response:
    return await client.request(method, url, json={"text": "pin"} if url.endswith("/pins") else None)


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_conversation_that_is_not_known_is_not_found(method: str, path: str) -> None:
    async with two_rounds() as (_, client):
        answer = await requested(client, method, f"/admin/v1/conversations/c_nobody{path}")
    assert error_of(answer) == (404, "conversation_not_found")


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_while_the_store_is_away_it_says_so(method: str, path: str) -> None:
    async with two_rounds() as (here, client):
        here.store.away = True
        answer = await requested(client, method, f"{PATH}{path}")
    assert error_of(answer) == (503, "store_unavailable")


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/nothing")])
async def test_nothing_is_told_without_the_key(method: str, path: str) -> None:
    async with two_rounds(key=KEY) as (_, client):
        answer = await requested(client, method, f"{PATH}{path}")
    assert error_of(answer) == (401, "invalid_admin_key")


async def test_the_key_opens_and_without_one_another_machine_is_refused() -> None:
    async with two_rounds(key=KEY, peer="10.0.0.1") as (_, client):
        answer = await client.get(PATH, headers={"authorization": f"Bearer {KEY}", "host": "proxy.example"})
        assert answer.status_code == 200
    async with two_rounds(peer="10.0.0.1") as (_, client):
        assert error_of(await client.get(PATH)) == (403, "admin_key_required")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/pins", b"{", 422),
        ("POST", "/pins", b"{}", 422),
        ("POST", "/pins", b'{"text": 5}', 422),
        ("POST", "/pins", b'{"text": "\\ud800"}', 422),
        ("GET", "/search", b"", 422),
        ("GET", "/search?q=x&limit=0", b"", 422),
        ("GET", "/search?q=x&limit=many", b"", 422),
        ("GET", "/search?q=" + "x" * 1_001, b"", 422),
    ],
)
async def test_bad_input_is_refused_in_openai_s_shape_and_not_repeated(
    method: str, path: str, body: bytes, status: int
) -> None:
    async with two_rounds() as (_, client):
        headers = {"content-type": "application/json"}
        answer = await client.request(method, PATH + path, content=body, headers=headers)
    assert error_of(answer)[0] == status
    assert "x" * 100 not in answer.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"text": "\xff"}', "The request body is not valid."),
        # Which limit this hits, and so what the message says, depends on the version of Python.
        (b"[" * 5_000 + b"]" * 5_000, ""),
        (b"[" * 50_000, ""),
    ],
    ids=["not UTF-8", "deep", "deep and not closed"],
)
async def test_a_body_that_cannot_be_read_is_invalid_input_and_no_unknown_path(
    body: bytes, message: str
) -> None:
    async with two_rounds() as (_, client):
        headers = {"content-type": "application/json"}
        answer = await client.post(f"{PATH}/pins", content=body, headers=headers)
    assert error_of(answer) == (422, "invalid_request")
    assert message in answer.json()["error"]["message"]
    assert PATH not in answer.text


async def test_a_wrong_method_or_path_is_refused_in_openai_s_shape() -> None:
    async with two_rounds() as (_, client):
        assert error_of(await client.put(PATH)) == (405, "method_not_allowed")
        assert error_of(await client.get("/admin/v1/nothing")) == (404, "not_found")


@pytest.mark.parametrize("base_path", ["", "/compaction"])
async def test_the_api_is_described_where_it_is(base_path: str) -> None:
    async with two_rounds(base_path=base_path) as (_, client):
        described = (await client.get(f"{base_path}/admin/v1/openapi.json")).json()
        assert (await client.get(base_path + PATH)).status_code == 200
    overall = (
        "/conversations", "/stats", "/models", "/config", "/events", "/events/stream", "/export.json",
        "/export.csv", "/upstream-failures", "/replay",
    )  # fmt: skip
    of_one = (
        "", "/events", "/compact", "/undo", "/redo", "/pins", "/pins/{pin}", "/search", "/messages/{message}",
        "/export", "/tenant", "/bypass", "/resume", "/exchanges", "/compactions", "/compactions/{place}",
        "/instructions", "/instructions/{instruction}",
    )  # fmt: skip
    paths = {*overall, *(f"/conversations/{{conversation}}{path}" for path in of_one)}
    assert set(described["paths"]) == {f"{base_path}/admin/v1{path}" for path in paths}
    assert described["components"]["securitySchemes"] == {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
    assert "Conversation" in described["components"]["schemas"]
    conversation = described["paths"][f"{base_path}/admin/v1/conversations/{{conversation}}"]
    assert conversation["delete"]["summary"] == "Delete all stored data of a conversation and its branches"


async def test_health_needs_no_key() -> None:
    async with two_rounds(key=KEY) as (_, client):
        assert (await client.get("/livez")).status_code == 200
