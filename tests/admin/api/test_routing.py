"""docs/admin-api.md: every route stands in it, and every request that it shows for all is answered."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from compaction_proxy.admin.api.routing import API_PATH, AdminApi, cut_page
from compaction_proxy.admin.app import create_admin_app
from compaction_proxy.admin.auth import AccessPolicy
from compaction_proxy.admin.health import Readiness
from compaction_proxy.core.event import COMPACTED, Event, to_fields
from compaction_proxy.storage.memory import MemoryStore
from tests.helpers.watched import Watched

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "admin-api.md").read_text("utf-8")
# It has no end.
STREAM = "events/stream"


def client() -> tuple[Watched, httpx.AsyncClient]:
    here = Watched(MemoryStore(), 60.0)
    ready = Readiness(ready=True, store="ok", version="1")
    app = create_admin_app(
        lambda: ready,
        "",
        AdminApi(here.steering, here.watching, here.replaying, AccessPolicy("127.0.0.1", "k")),
    )
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    headers = {"authorization": "Bearer k"}
    return here, httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:4141", headers=headers)


@pytest.mark.parametrize(
    ("limit", "offset", "page", "following"),
    [
        (2, 0, [0, 1], 2),
        (2, 2, [2, 3], 4),
        (2, 4, [4], None),
        (2, 9, [], None),
        (5, 0, [0, 1, 2, 3, 4], None),
    ],
)
def test_pages_follow_one_another(limit: int, offset: int, page: list[int], following: int | None) -> None:
    assert cut_page([*range(5)], limit, offset) == (page, following)


async def test_every_page_that_an_answer_names_can_be_asked_for() -> None:
    here, asked = client()
    for number in range(3 * 500):
        here.feed.on_event("t", Event(COMPACTED, float(number), "c_1"))
        if number % 500 == 499:
            await here.feed.flush()
    async with asked:
        first = (await asked.get(f"{API_PATH}/events?limit=1000&offset=100")).json()
        last = await asked.get(f"{API_PATH}/events?limit=1000&offset={first['next']}")
    assert (first["next"], last.status_code) == (1_100, 200)
    assert (len(last.json()["events"]), last.json()["next"]) == (400, None)


async def test_what_the_guide_asks_of_all_conversations_is_answered() -> None:
    here, asked = client()
    section = GUIDE.partition("## All conversations")[2].partition("\n## ")[0]
    paths = [path for path in re.findall(r"^\| `GET ([^`]+)`", section, re.MULTILINE) if path != STREAM]
    commands = [shlex.split(line) for line in GUIDE.splitlines() if line.startswith("curl ")]
    urls = [words[-1] for words in commands if "…" not in words[-1] and not words[-1].endswith(STREAM)]
    async with asked:
        statuses = {path: (await asked.get(f"{API_PATH}/{path}")).status_code for path in paths}
        statuses |= {url: (await asked.get(url)).status_code for url in urls}
    await here.records.close()
    assert len(statuses) >= 8
    assert set(statuses.values()) == {200}, statuses


async def test_every_route_stands_in_the_guide() -> None:
    here, asked = client()
    async with asked:
        described: dict[str, Any] = (await asked.get(f"{API_PATH}/openapi.json")).json()["paths"]
    await here.records.close()
    told = [
        re.sub(r"\?.*", "", path)
        for path in re.findall(r"`(?:[A-Z]+(?:`, `[A-Z]+)* )?([\w{}/.…?=&-]+)`", GUIDE)
    ]
    named = {path.replace("…", "conversations/{id}") for path in told}
    wanted = {path.removeprefix(f"{API_PATH}/").replace("{conversation}", "{id}") for path in described}
    assert wanted - named == set()


def test_the_message_of_the_stream_has_the_fields_of_one() -> None:
    [shown] = re.findall(r"```text\n(id: .*?)```", GUIDE, re.DOTALL)
    fields = dict(line.split(": ", 1) for line in shown.splitlines())
    event = Event(COMPACTED, 1.0, "c_1", tokens_before=2, tokens_after=1)
    assert json.loads(fields["data"]).keys() == to_fields(event).keys()
    assert fields.keys() == {"id", "event", "data"}
