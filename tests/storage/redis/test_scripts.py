"""The Lua scripts, run on a server as they are: what they write, refuse to write, and return."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from compaction_proxy.storage.redis.scripts import (
    ACQUIRE,
    REGISTER_SCOPE,
    RELEASE,
    RENEW,
    WRITE,
    LuaScript,
)

DAY_MS = 86_400_000


class Keys:
    """Runs scripts on keys below a prefix of their own."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.prefix = f"test-{secrets.token_hex(6)}:"

    def full(self, key: str) -> str:
        return self.prefix + key

    def run(self, script: LuaScript, keys: list[str], *arguments: str | bytes | int) -> Any:
        return self.server.eval(script.text, len(keys), *map(self.full, keys), *arguments)

    def acquire(self, token: str) -> Any:
        return self.run(ACQUIRE, ["lease", "counter"], DAY_MS, token, DAY_MS)

    def commit(self, value: bytes, *, fence: bytes = b"") -> Any:
        """Writes a claim and a line of a list, in the scope `scope`."""
        keys = ["lease", "scope", "claim", "list"]
        return self.run(WRITE, keys, 1, fence, DAY_MS, 0, DAY_MS, value, 2, DAY_MS, value)

    def read(self) -> tuple[Any, Any]:
        """Returns the claim and the list."""
        return self.server.get(self.full("claim")), self.server.lrange(self.full("list"), 0, -1)


@pytest.fixture
def keys(redis_server: tuple[str, Any]) -> Iterator[Keys]:
    made = Keys(redis_server[1])
    yield made
    for key in made.server.scan_iter(made.prefix + "*"):
        made.server.delete(key)


@pytest.mark.parametrize("script", [WRITE, ACQUIRE, RENEW, RELEASE, REGISTER_SCOPE])
def test_the_digest_of_a_script_is_the_one_under_which_the_server_caches_it(
    keys: Keys, script: LuaScript
) -> None:
    assert keys.server.script_load(script.text) == script.digest


def test_a_lease_is_held_by_one_token_and_a_repeated_call_gets_the_same_fence(keys: Keys) -> None:
    fence = keys.acquire("mine")
    assert int(fence) > 0
    assert keys.acquire("mine") == fence
    assert keys.acquire("theirs") is None


def test_fences_rise_if_the_counter_was_lost_and_if_the_clock_was_set_back(keys: Keys) -> None:
    first = keys.acquire("a")
    assert keys.run(RELEASE, ["lease"], first) == 1
    keys.server.delete(keys.full("counter"))
    second = keys.acquire("b")
    assert int(second) > int(first)

    assert keys.run(RELEASE, ["lease"], second) == 1
    of_tomorrow = int(second) + 1000 * DAY_MS
    keys.server.set(keys.full("counter"), of_tomorrow)
    assert int(keys.acquire("c")) == of_tomorrow + 1


def test_a_lease_is_renewed_and_released_only_by_its_fence(keys: Keys) -> None:
    fence = keys.acquire("mine")
    other = fence + b"0"
    assert (keys.run(RENEW, ["lease"], other, DAY_MS), keys.run(RELEASE, ["lease"], other)) == (0, 0)
    assert keys.run(RENEW, ["lease"], fence, 2 * DAY_MS) == 1
    assert keys.server.pttl(keys.full("lease")) > DAY_MS
    assert keys.run(RELEASE, ["lease"], fence) == 1
    assert keys.run(RENEW, ["lease"], fence, DAY_MS) == 0


def test_a_commit_without_the_lease_that_it_names_writes_nothing(keys: Keys) -> None:
    fence = keys.acquire("mine")
    keys.run(RELEASE, ["lease"], fence)
    assert keys.commit(b"late", fence=fence) is None
    assert keys.read() == (None, [])


def test_the_first_commit_of_a_claim_wins_and_a_later_one_is_told_its_value(keys: Keys) -> None:
    fence = keys.acquire("mine")
    assert keys.commit(b"first", fence=fence) == 1
    assert keys.commit(b"second", fence=fence) == b"first"
    assert keys.read() == (b"first", [b"first"])
    assert keys.server.smembers(keys.full("scope")) == {keys.full(key).encode() for key in ("claim", "list")}


def test_a_list_keeps_its_newest_lines_and_takes_the_place_of_a_value_of_another_type(keys: Keys) -> None:
    keys.server.set(keys.full("list"), "no list")
    for line in (b"1", b"2", b"3"):
        keys.run(WRITE, ["lease", "scope", "list"], 0, "", 0, 2, DAY_MS, line)
    assert keys.read() == (None, [b"2", b"3"])
    assert keys.server.exists(keys.full("scope")) == 0


def test_a_tenant_with_too_many_scopes_loses_the_oldest_ones_some_at_a_time(keys: Keys) -> None:
    for n in range(5):
        keys.server.zadd(keys.full("scopes"), {f"s{n}": keys.server.time()[0] * 1000 - 100 + n})
    leaving = [keys.run(REGISTER_SCOPE, ["scopes"], "new", DAY_MS, 3, 2) for _ in range(3)]
    assert leaving == [[b"s0", b"s1"], [b"s2"], []]
    assert keys.server.zrange(keys.full("scopes"), 0, -1) == [b"s3", b"s4", b"new"]


def test_a_scope_without_a_write_for_its_lifetime_is_forgotten(keys: Keys) -> None:
    keys.server.zadd(keys.full("scopes"), {"old": keys.server.time()[0] * 1000 - DAY_MS - 1000})
    assert keys.run(REGISTER_SCOPE, ["scopes"], "new", DAY_MS, 3, 2) == []
    assert keys.server.zrange(keys.full("scopes"), 0, -1) == [b"new"]
