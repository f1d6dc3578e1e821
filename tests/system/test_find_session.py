"""Users find their conversation by what they call it, in the admin API, on the dashboard and with the CLI."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Proxy, run_proxy

ADMIN_KEY = "secret-key-for-tests"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
CONFIG: dict[str, Any] = {"server": {"admin_key": ADMIN_KEY}}
OWN_ID = "ticket-4711"
MESSAGES = [{"role": "user", "content": "Which port does the proxy use?"}]


@pytest.fixture
def proxy(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    with run_proxy(tmp_path, provider.url, CONFIG) as running:
        yield running


def ask(proxy: Proxy, headers: dict[str, str], credential: str = "sk-one", **members: Any) -> None:
    with proxy.client() as client:
        found = client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": MESSAGES, **members},
            headers={"authorization": f"Bearer {credential}", **headers},
        )
    assert found.status_code == 200, found.text


def list_ids(proxy: Proxy, **query: str) -> list[str]:
    with proxy.client(headers=ADMIN) as client:
        found = client.get("/admin/v1/conversations", params=query)
    assert found.status_code == 200, found.text
    return [row["id"] for row in found.json()["conversations"]]


def wait_for_count(proxy: Proxy, count: int) -> list[str]:
    listed: list[str] = proxy.wait_for(
        lambda: found if len(found := list_ids(proxy)) == count else None, f"{count} conversations are listed"
    )
    return listed


OWN_NAMES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "a header": ({"x-session-id": OWN_ID}, {}),
    "the header of a client": ({"x-claude-code-session-id": OWN_ID}, {}),
    "a member of the body": ({}, {"metadata": {"session_id": OWN_ID}}),
    "baggage": ({"baggage": f"a=b,session.id={OWN_ID}"}, {}),
}


@pytest.mark.parametrize("place", OWN_NAMES)
def test_a_search_takes_the_client_s_own_id_from_wherever_it_comes(proxy: Proxy, place: str) -> None:
    headers, members = OWN_NAMES[place]
    ask(proxy, {"x-session-id": "another"})
    ask(proxy, headers, **members)
    everything = set(wait_for_count(proxy, 2))
    found = list_ids(proxy, q=OWN_ID)
    assert len(found) == 1
    assert list_ids(proxy, q=OWN_ID.upper()) == []
    assert list_ids(proxy, session=OWN_ID) == found
    assert list_ids(proxy, session=OWN_ID, q="in-no-conversation") == []
    assert [*found, *list_ids(proxy, session="another")] == sorted(
        everything, key=lambda each: each not in found
    )


def test_the_dashboard_finds_a_conversation_by_the_client_s_own_id(proxy: Proxy) -> None:
    ask(proxy, {"x-session-id": "another"})
    [another] = wait_for_count(proxy, 1)
    ask(proxy, {"x-session-id": OWN_ID})
    [mine] = set(wait_for_count(proxy, 2)) - {another}
    with proxy.client(auth=("admin", ADMIN_KEY)) as client:
        page = client.get("/ui/conversations", params={"q": OWN_ID}).text
    assert f">{mine}</a>" in page
    assert page.count('<th scope="row">') == 1


def test_sessions_show_takes_the_client_s_own_id(proxy: Proxy) -> None:
    ask(proxy, {"x-session-id": OWN_ID})
    [mine] = wait_for_count(proxy, 1)
    done = proxy.run_command(ADMIN_KEY, "sessions", "show", OWN_ID)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == ["id", mine]


def test_an_own_id_of_26_characters_is_not_taken_for_one_of_the_proxy(proxy: Proxy) -> None:
    own = "01JD3ZK9V5X8Q2W7R4T6Y1P0AB"
    ask(proxy, {"x-session-id": own})
    [mine] = wait_for_count(proxy, 1)
    done = proxy.run_command(ADMIN_KEY, "sessions", "show", own)
    assert (done.returncode, done.stderr) == (0, "")
    assert mine in done.stdout


def test_conversations_of_two_keys_under_one_own_id_are_both_found_and_none_is_chosen(proxy: Proxy) -> None:
    ask(proxy, {"x-session-id": OWN_ID}, "sk-one")
    ask(proxy, {"x-session-id": OWN_ID}, "sk-two")
    both = wait_for_count(proxy, 2)
    assert sorted(list_ids(proxy, q=OWN_ID)) == sorted(both)
    done = proxy.run_command(ADMIN_KEY, "sessions", "delete", OWN_ID, "--yes")
    assert (done.returncode, done.stderr) == (
        1,
        f"2 conversations match '{OWN_ID}'\n",
    )
    assert sorted(list_ids(proxy)) == sorted(both)


def test_the_own_id_is_nowhere_in_the_store(tmp_path: Path, provider: Provider) -> None:
    path = tmp_path / "state.db"
    config = {**CONFIG, "store": {"url": f"sqlite:///{path}"}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        ask(proxy, {"x-session-id": OWN_ID})
        assert proxy.wait_for(lambda: list_ids(proxy, session=OWN_ID), "the conversation is found")
        files = [each.read_bytes() for each in tmp_path.glob("state.db*")]
    assert files
    assert not [data for data in files if OWN_ID.encode() in data]
