"""A round of a small conversation holds after a restart and on every replica."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.redis_servers import RedisServer
from tests.system.black_box import Provider, Proxy, Received, Reply, run_proxy
from tests.system.test_output_reserve import prose
from tests.system.test_unnumbered_limit import WIRES, Wire

STEPS = 6
ADMIN_KEY = "an-admin-key-of-24-letters"
SECTIONS: dict[str, Any] = {"summary": {"model": "none"}, "server": {"admin_key": ADMIN_KEY}}
NAMED = {"x-session-id": "s-1"}
FORCE = {"x-compaction": "force"}


class Upstream:
    """A provider that accepts everything and lists the conversations that it was sent."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        self.provider = Provider(self.answer)

    def answer(self, request: Received) -> Reply:
        if request.method == "GET":
            return Reply(404)
        wire = next(each for each in WIRES.values() if request.path.endswith(each.path))
        self.sent.append(request.json()[wire.field])
        return wire.reply(request, refused=False)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    yield made
    made.provider.close()


@pytest.fixture
def starts() -> Iterator[ExitStack]:
    """Ends every proxy that a test has started."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield f"redis://127.0.0.1:{server.port}"


def start(stack: ExitStack, folder: Path, upstream: Upstream, store: str) -> Proxy:
    folder.mkdir(exist_ok=True)
    sections = {**SECTIONS, "store": {"url": store}}
    return stack.enter_context(run_proxy(folder, upstream.provider.url, sections))


def talk(wire: Wire, steps: int = STEPS) -> list[Any]:
    """A small conversation; a longer one begins with a shorter one."""
    messages: list[Any] = [{"role": "user", "content": prose(100, "task")}]
    for step in range(steps):
        messages += wire.unit(step, prose(400, f"result-{step}"))
    return messages


def post(proxy: Proxy, wire: Wire, messages: list[Any], headers: dict[str, str]) -> httpx.Response:
    with proxy.client(headers=headers) as client:
        reply = client.post(wire.path, json=wire.request(messages, stream=True))
    assert reply.status_code == 200, reply.text
    return reply


def go_on(
    proxy: Proxy, wire: Wire, upstream: Upstream, compacted: list[Any], headers: dict[str, str]
) -> None:
    """The next request must go on from what replaced its beginning, byte for byte."""
    post(proxy, wire, talk(wire, STEPS + 1), headers)
    assert json.dumps(upstream.sent[-1]).startswith(json.dumps(compacted)[:-1])
    assert upstream.sent[-1] == [*compacted, *wire.unit(STEPS, prose(400, f"result-{STEPS}"))]


@pytest.mark.parametrize("headers", [NAMED, {}], ids=["session", "no-session"])
@pytest.mark.parametrize("asked", [FORCE, {"x-compaction-trigger-tokens": "1500"}], ids=["force", "trigger"])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_round_holds_after_a_restart(
    wire: Wire, asked: dict[str, str], headers: dict[str, str], upstream: Upstream, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'state.db'}"
    with ExitStack() as stack:
        first = start(stack, tmp_path / "first", upstream, store)
        reply = post(first, wire, talk(wire), headers | asked)
        assert reply.headers["x-compaction-status"] == "applied"
        compacted = upstream.sent[-1]
        assert compacted != talk(wire)
    with ExitStack() as stack:
        second = start(stack, tmp_path / "first", upstream, store)
        go_on(second, wire, upstream, compacted, headers)


@pytest.mark.parametrize("headers", [NAMED, {}], ids=["session", "no-session"])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_round_holds_on_the_other_replicas(
    wire: Wire, headers: dict[str, str], upstream: Upstream, starts: ExitStack, redis_url: str, tmp_path: Path
) -> None:
    store = f"{redis_url}?prefix={wire.name}-{len(headers)}:"
    one = start(starts, tmp_path / "one", upstream, store)
    other = start(starts, tmp_path / "other", upstream, store)
    reply = post(one, wire, talk(wire), headers | FORCE)
    assert reply.headers["x-compaction-status"] == "applied"
    compacted = upstream.sent[-1]
    go_on(other, wire, upstream, compacted, headers)
    late = start(starts, tmp_path / "late", upstream, store)
    go_on(late, wire, upstream, compacted, headers)


def test_what_an_admin_asks_of_one_replica_another_one_does(
    upstream: Upstream, starts: ExitStack, redis_url: str, tmp_path: Path
) -> None:
    wire, store = WIRES["chat"], f"{redis_url}?prefix=admin:"
    one = start(starts, tmp_path / "one", upstream, store)
    other = start(starts, tmp_path / "other", upstream, store)
    post(one, wire, talk(wire), NAMED)
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    with one.client(headers=key) as admin:
        listed = one.wait_for(
            lambda: admin.get("/admin/v1/conversations").json()["conversations"], "it is listed"
        )
        assert admin.post(f"/admin/v1/conversations/{listed[0]['id']}/compact").is_success
    reply = post(other, wire, talk(wire, STEPS + 1), NAMED)
    assert reply.headers["x-compaction-status"] == "applied"
    assert upstream.sent[-1] != talk(wire, STEPS + 1)


def test_conversations_of_others_still_go_on_unread(
    upstream: Upstream, starts: ExitStack, tmp_path: Path
) -> None:
    wire, store = WIRES["chat"], f"sqlite:///{tmp_path / 'state.db'}"
    proxy = start(starts, tmp_path / "proxy", upstream, store)
    post(proxy, wire, talk(wire), {"authorization": "Bearer one"} | FORCE)
    for who, headers in (("two", {}), ("two", NAMED), ("one", NAMED)):
        reply = post(proxy, wire, talk(wire), headers | {"authorization": f"Bearer {who}"})
        assert "x-compaction-request-id" not in reply.headers  # what is read gets one
        assert upstream.sent[-1] == talk(wire)
