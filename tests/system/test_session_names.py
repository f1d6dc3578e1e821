"""Lists show the client's own session ids and titles, if the configuration says so, and else neither."""

import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import COMMAND, REQUEST_LIMIT_S, Provider, Proxy, run_proxy

ADMIN_KEY = "secret-key-for-tests"
OWN_ID = "ticket-4711"
TEXT = "Find out why the nightly report is empty."
READ = {"x-compaction": "force"}  # has even a small request read
STORED = {"store_names": True, "store_titles": True}


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


def configure(tmp_path: Path, **session: bool) -> dict[str, Any]:
    """A configuration with a store on disk."""
    url = f"sqlite:///{tmp_path / 'state.db'}"
    return {"server": {"admin_key": ADMIN_KEY}, "store": {"url": url}, "session": session}


@cache
def read_schema() -> str:
    done = subprocess.run(
        [COMMAND, "config", "schema"], capture_output=True, text=True, timeout=REQUEST_LIMIT_S, check=False
    )
    return done.stdout


def configure_stored(tmp_path: Path) -> dict[str, Any]:
    """A configuration that has names and titles stored."""
    assert [name for name in STORED if f'"{name}"' not in read_schema()] == []
    return configure(tmp_path, **STORED)


def ask(proxy: Proxy, headers: dict[str, str], **members: Any) -> None:
    messages = [{"role": "user", "content": TEXT}]
    with proxy.client() as client:
        found = client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": messages, **members},
            headers={"authorization": "Bearer sk-one", **headers},
        )
    assert found.status_code == 200, found.text


def list_rows(proxy: Proxy, query: str = "") -> list[dict[str, Any]]:
    with proxy.client(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        found = client.get("/admin/v1/conversations", params={"q": query})
    rows: list[dict[str, Any]] = found.json()["conversations"]
    return rows


def wait_for_row(proxy: Proxy) -> dict[str, Any]:
    [row] = proxy.wait_for(lambda: list_rows(proxy), "the conversation is listed")
    return dict(row)


@pytest.mark.parametrize("control", [{}, READ], ids=["unread", "read"])
@pytest.mark.parametrize(
    ("headers", "members", "name"),
    [
        ({"x-session-id": OWN_ID}, {}, OWN_ID),
        (
            {"x-claude-code-session-id": OWN_ID, "x-claude-code-agent-id": "explorer"},
            {},
            f"{OWN_ID} / explorer",
        ),
        ({}, {"metadata": {"session_id": OWN_ID}}, OWN_ID),
        ({}, {}, ""),
    ],
    ids=["header", "agent", "body", "none"],
)
def test_a_list_shows_what_the_client_calls_a_conversation_and_what_was_said_last(
    tmp_path: Path,
    provider: Provider,
    headers: dict[str, str],
    members: dict[str, Any],
    name: str,
    control: dict[str, str],
) -> None:
    with run_proxy(tmp_path, provider.url, configure_stored(tmp_path)) as proxy:
        ask(proxy, {**headers, **control}, **members)
        row = wait_for_row(proxy)
        assert (row.get("name"), row.get("title")) == (name, TEXT)
        assert [each["id"] for each in list_rows(proxy, "NIGHTLY")] == [row["id"]]
        assert [each["id"] for each in list_rows(proxy, "et-4")] == ([row["id"]] if name else [])


def test_the_dashboard_and_the_commands_show_both(tmp_path: Path, provider: Provider) -> None:
    with run_proxy(tmp_path, provider.url, configure_stored(tmp_path)) as proxy:
        ask(proxy, {"x-session-id": OWN_ID})
        conversation = wait_for_row(proxy)["id"]
        with proxy.client(auth=("admin", ADMIN_KEY)) as client:
            pages = [client.get(f"/ui/conversations{path}").text for path in ("", f"/{conversation}")]
        shown = [run_command(proxy, *words) for words in (("list",), ("show", conversation))]
    assert [(OWN_ID in text, TEXT in text) for text in (*pages, *shown)] == [(True, True)] * 4


def test_by_default_neither_is_stored(tmp_path: Path, provider: Provider) -> None:
    with run_proxy(tmp_path, provider.url, configure(tmp_path)) as proxy:
        ask(proxy, {"x-session-id": OWN_ID})
        row = wait_for_row(proxy)
        stored = b"".join(each.read_bytes() for each in tmp_path.glob("state.db*"))
    assert (row.get("name"), row.get("title")) == ("", "")
    assert OWN_ID.encode() not in stored
    assert TEXT[:20].encode() not in stored


def test_a_deleted_conversation_leaves_neither(tmp_path: Path, provider: Provider) -> None:
    with run_proxy(tmp_path, provider.url, configure_stored(tmp_path)) as proxy:
        ask(proxy, {"x-session-id": OWN_ID})
        row = wait_for_row(proxy)
        assert row.get("name") == OWN_ID
        with proxy.client(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
            client.delete(f"/admin/v1/conversations/{row['id']}").raise_for_status()
        assert list_rows(proxy, OWN_ID) == []


def run_command(proxy: Proxy, *words: str) -> str:
    done = subprocess.run(
        [COMMAND, "sessions", *words, "--url", proxy.url],
        capture_output=True,
        text=True,
        timeout=REQUEST_LIMIT_S,
        env={**os.environ, "HOME": str(proxy.folder), "COMPACTION_PROXY__SERVER__ADMIN_KEY": ADMIN_KEY},
        cwd=proxy.folder / "..",
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
