"""Lists of conversations have labels, filters and pages: in the admin API, on the dashboard, with the CLI."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Proxy, run_proxy
from tests.system.test_one_conversation import ADMIN_KEY, CONFIG, LONG, answer

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
PATH = "/v1/chat/completions"
LABEL = "x-compaction-label"
ROWS_PER_PAGE = 25
TURN = [{"role": "user", "content": "Which port does the proxy use?"}]


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider(answer)
    yield made
    made.close()


@pytest.fixture
def proxy(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    with run_proxy(tmp_path, provider.url, CONFIG) as running:
        yield running


def ask(
    proxy: Proxy,
    session: str,
    messages: list[dict[str, str]] = TURN,
    model: str = "m",
    key: str = "sk-one",
    control: dict[str, str] | None = None,
) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer."""
    with proxy.client() as client:
        found = client.post(
            PATH,
            json={"model": model, "messages": messages},
            headers={"authorization": f"Bearer {key}", "x-session-id": session, **(control or {})},
        )
    return found.status_code, dict(found.headers)


def list_page(proxy: Proxy, **query: str | int) -> dict[str, Any]:
    with proxy.client(headers=ADMIN) as client:
        found = client.get("/admin/v1/conversations", params=query)
    assert found.status_code == 200, found.text
    page: dict[str, Any] = found.json()
    return page


def list_ids(proxy: Proxy, **query: str | int) -> set[str]:
    return {row["id"] for row in list_page(proxy, **query)["conversations"]}


def wait_for_count(proxy: Proxy, count: int) -> set[str]:
    listed: set[str] = proxy.wait_for(
        lambda: found if len(found := list_ids(proxy, limit=1_000)) == count else None,
        f"{count} conversations are listed",
    )
    return listed


def test_a_request_is_listed_as_soon_as_it_has_ended(proxy: Proxy) -> None:
    for number in range(1, 21):
        ask(proxy, "s")
        proxy.wait_for_quiet()
        assert [row["requests"] for row in list_page(proxy)["conversations"]] == [number]


def read_page(proxy: Proxy, **query: str) -> str:
    with proxy.client(auth=("admin", ADMIN_KEY)) as client:
        found = client.get("/ui/conversations", params=query)
    assert found.status_code == 200, found.text
    return found.text


def test_a_label_stands_in_the_list_though_the_request_is_not_read(proxy: Proxy, provider: Provider) -> None:
    told = ask(proxy, "a", control={LABEL: "nightly%20report%20%C3%BC"})[1]
    ask(proxy, "a")  # a request without a label leaves it as it is
    wait_for_count(proxy, 1)
    proxy.wait_for(lambda: list_page(proxy)["conversations"][0]["requests"] == 2, "both are counted")
    [row] = list_page(proxy)["conversations"]
    with proxy.client(headers=ADMIN) as client:
        exchanges = client.get(f"/admin/v1/conversations/{row['id']}/exchanges").json()["exchanges"]
    assert row.get("label") == "nightly report ü"
    assert [each["label"] for each in exchanges] == ["nightly report ü", ""]
    assert "x-compaction-tokens-before" not in told
    assert "x-compaction-label" not in provider.received[0].headers
    assert "nightly report ü" in read_page(proxy)
    assert list_ids(proxy, q="REPORT") == {row["id"]}


@pytest.mark.parametrize("label", ["", "%0a", "x" * 65, "%ff"], ids=["empty", "control", "long", "no-utf-8"])
def test_a_label_that_makes_no_sense_is_refused(proxy: Proxy, label: str) -> None:
    with proxy.client() as client:
        found = client.post(
            PATH, json={"model": "m", "messages": TURN}, headers={"x-compaction-label": label}
        )
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "invalid_compaction_header"
    assert "x-compaction-label" in found.json()["error"]["message"]


def test_lists_are_filtered_by_model_key_label_strategy_status_and_time(proxy: Proxy) -> None:
    long = [
        {"role": role, "content": LONG + role} for role in ("user", "assistant", "user", "assistant", "user")
    ]
    told = {
        "model": ask(proxy, "1", model="vendor/Small-2")[1],
        "label": ask(proxy, "2", control={LABEL: "blue"})[1],
        "status": ask(proxy, "3", control={"x-compaction": "bypass"})[1],
        "key": ask(proxy, "4", key="sk-two")[1],
        "strategy": ask(proxy, "5", long)[1],
    }
    assert told["strategy"]["x-compaction-status"] == "applied"
    wait_for_count(proxy, 5)
    ids = {
        name: list_page(proxy, session=str(number))["conversations"][0]["id"]
        for number, name in enumerate(told, 1)
    }
    assert len(set(ids.values())) == 5
    rows = {row["id"]: row for row in list_page(proxy)["conversations"]}
    filters = {
        "model": "small",
        "label": "blue",
        "status": "bypassed",
        "key": rows[ids["key"]]["key"],
        "strategy": "anchored",
    }
    for name, value in filters.items():
        assert list_ids(proxy, **{name: value}) == {ids[name]}, name
        done = proxy.run_command(ADMIN_KEY, "sessions", "list", "--json", f"--{name}", value)
        assert [row["id"] for row in json.loads(done.stdout)["conversations"]] == [ids[name]], name
        page = read_page(proxy, **{name: value})
        assert re.findall(r">(c_[0-9a-f]{24})</a>", page) == [ids[name]], name
    assert list_ids(proxy, label="blue", model="small") == set()
    assert list_ids(proxy, since="1h") == set(rows)
    assert list_ids(proxy, until="1h") == set()
    assert list_ids(proxy, since=str(int(time.time()) + 1_000)) == set()


def test_pages_of_a_list_follow_one_another(proxy: Proxy) -> None:
    for number in range(5):
        ask(proxy, str(number))
    everything = wait_for_count(proxy, 5)
    first = list_page(proxy, limit=2)
    second = list_page(proxy, limit=2, offset=2)
    last = list_page(proxy, limit=2, offset=4)
    assert [page.get("next") for page in (first, second, last)] == [2, 4, None]
    ids = [row["id"] for page in (first, second, last) for row in page["conversations"]]
    assert sorted(ids) == sorted(everything)
    listed = [
        proxy.run_command(ADMIN_KEY, "sessions", "list", "--limit", "3", "--offset", each)
        for each in ("0", "3")
    ]
    assert [len(each.stdout.splitlines()) for each in listed] == [4, 3]
    assert [each.stderr for each in listed] == ["more with --offset 3\n", ""]


@pytest.mark.parametrize("kind", ["exchanges", "events"])
def test_exchanges_and_events_of_a_conversation_come_in_pages_the_newest_first(
    kind: str, proxy: Proxy
) -> None:
    for number in range(5):
        ask(proxy, "one", [{"role": "user", "content": f"Question {number}"}])
    [name] = wait_for_count(proxy, 1)
    path = f"/admin/v1/conversations/{name}/{kind}"
    with proxy.client(headers=ADMIN) as client:
        for number in range(5):
            pinned = client.post(f"/admin/v1/conversations/{name}/pins", json={"text": f"pin {number}"})
            assert pinned.status_code == 201

        def read(**query: int) -> dict[str, Any]:
            page: dict[str, Any] = client.get(path, params=query).json()
            return page

        everything = proxy.wait_for(
            lambda: rows if len(rows := read()[kind]) == 5 else None, f"there are 5 {kind}"
        )
        first, second, last = (read(limit=2, offset=offset) for offset in (0, 2, 4))
    assert [page.get("next") for page in (first, second, last)] == [2, 4, None]
    assert [*last[kind], *second[kind], *first[kind]] == everything
    listed = [
        proxy.run_command(ADMIN_KEY, "sessions", kind, name, "--limit", "3", "--offset", each)
        for each in ("0", "3")
    ]
    assert [len(each.stdout.splitlines()) for each in listed] == [4, 3]
    assert [each.stderr for each in listed] == ["more with --offset 3\n", ""]
    as_json = proxy.run_command(ADMIN_KEY, "sessions", kind, name, "--limit", "2", "--json")
    assert json.loads(as_json.stdout) == first


def test_events_of_all_conversations_come_in_pages_the_newest_first(proxy: Proxy) -> None:
    ask(proxy, "one")
    [name] = wait_for_count(proxy, 1)
    with proxy.client(headers=ADMIN) as client:
        for number in range(5):
            client.post(f"/admin/v1/conversations/{name}/pins", json={"text": f"pin {number}"})

        def read(**query: int) -> dict[str, Any]:
            page: dict[str, Any] = client.get("/admin/v1/events", params=query).json()
            return page

        everything = proxy.wait_for(
            lambda: rows if len(rows := read()["events"]) == 5 else None, "there are 5 events"
        )
        first, second, last = (read(limit=2, offset=offset) for offset in (0, 2, 4))
    assert [page.get("next") for page in (first, second, last)] == [2, 4, None]
    assert [*first["events"], *second["events"], *last["events"]] == everything
    done = proxy.run_command(ADMIN_KEY, "sessions", "events", "--limit", "4")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["conversation", *[name] * 4]
    assert done.stderr == "more with --offset 4\n"


def test_the_dashboard_pages_long_lists_and_keeps_the_filter(proxy: Proxy) -> None:
    for number in range(ROWS_PER_PAGE + 3):
        assert ask(proxy, str(number), control={LABEL: "many"})[0] == 200
    ask(proxy, "another")
    everything = wait_for_count(proxy, ROWS_PER_PAGE + 4)
    first = read_page(proxy, label="many")
    following = re.search(r'href="(/ui/conversations\?[^"]*)">Next<', first)
    assert following is not None
    with proxy.client(auth=("admin", ADMIN_KEY)) as client:
        second = client.get(following[1].replace("&amp;", "&")).text
    shown = [re.findall(r">(c_[0-9a-f]{24})</a>", page) for page in (first, second)]
    assert [len(each) for each in shown] == [ROWS_PER_PAGE, 3]
    assert len({*shown[0], *shown[1]} & everything) == ROWS_PER_PAGE + 3
    assert ">Next<" not in second
    assert ">Previous<" in second
