from pathlib import Path

import pytest

from compaction_proxy.cli.forget import forget_client
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ProxyError
from compaction_proxy.gateway.identity import derive_tenant, find_conversation_id, format_origin
from compaction_proxy.storage.envelope import pack
from compaction_proxy.storage.factory import load_installation_secret
from compaction_proxy.storage.keys import (
    checkpoint_keys,
    conversation_key,
    conversation_tenant_key,
    roots_key,
)
from compaction_proxy.storage.sqlite.store import SqliteStore
from compaction_proxy.storage.store import ListEntry, Record

ALICE, BOB = [(b"authorization", b"Bearer alice")], [(b"authorization", b"Bearer bob")]
ONE, TWO = [(b"x-session-id", b"one")], [(b"x-session-id", b"two")]


def ignored(_: object) -> None:
    """A secret that cannot be kept would show in the assertions."""


async def stored(path: Path) -> tuple[Config, dict[str, list[str]]]:
    """Two sessions of Alice and one of Bob, each with a checkpoint and its totals; the keys by session."""
    url = f"sqlite:///{path}"
    config = Config.model_validate({"store": {"url": url}})
    secret = load_installation_secret(url, ignored)
    store = SqliteStore(path)
    keys: dict[str, list[str]] = {}
    for number, (name, who, session) in enumerate([("a1", ALICE, ONE), ("a2", ALICE, TWO), ("b1", BOB, ONE)]):
        whose = derive_tenant(who, secret, format_origin(config.upstream.base_url), "credential")
        named = find_conversation_id(session, config.session.headers, secret, whose)
        assert named is not None
        root = bytes([number]) * 32
        keys[name] = [
            checkpoint_keys(whose, root, "chained", [bytes(64)])[0],
            conversation_key(whose, named),
            conversation_tenant_key(named),
        ]
        for key in keys[name]:
            await store.write([Record(key, b"x", 60)])
        await store.write([ListEntry(roots_key(whose, named), pack({"root": root.hex()}), 60, 5)])
    await store.close()
    return config, keys


async def left(path: Path, keys: dict[str, list[str]]) -> list[str]:
    """The sessions of which anything is left beside the note of whose they are."""
    store = SqliteStore(path)
    found = [name for name, names in keys.items() if any(await store.read(names[:-1]))]
    await store.close()
    return found


async def test_one_session_is_forgotten_with_its_checkpoints(tmp_path: Path) -> None:
    config, keys = await stored(tmp_path / "s.db")
    assert await forget_client(config, ALICE, ONE) == 4
    assert await left(tmp_path / "s.db", keys) == ["a2", "b1"]


async def test_nothing_of_a_session_is_left_by_which_it_could_be_found(tmp_path: Path) -> None:
    config, keys = await stored(tmp_path / "s.db")
    await forget_client(config, ALICE, ONE)
    store = SqliteStore(tmp_path / "s.db")
    assert await store.read(keys["a1"]) == [None, None, None]
    await store.close()


async def test_a_tenant_is_forgotten_whole_and_nobody_else(tmp_path: Path) -> None:
    config, keys = await stored(tmp_path / "s.db")
    assert await forget_client(config, ALICE, None) == 6
    assert await left(tmp_path / "s.db", keys) == ["b1"]


async def test_a_known_client_is_forgotten_however_its_key_is_shown(tmp_path: Path) -> None:
    config, keys = await stored(tmp_path / "s.db")
    known = {"server": {"client_keys": ["alice"]}, "upstream": {"api_key": "sk-ours"}}
    served = Config.model_validate({"store": {"url": config.store.url}, **known})
    assert await forget_client(served, [(b"x-api-key", b"alice")], None) == 6
    assert await left(tmp_path / "s.db", keys) == ["b1"]


@pytest.mark.parametrize("field", [(b"x-nonsense", b"alice"), (b"authorization", b"")])
async def test_a_header_that_identifies_nobody_does_not_stand_for_all_without_a_credential(
    field: tuple[bytes, bytes], tmp_path: Path
) -> None:
    config, keys = await stored(tmp_path / "s.db")
    with pytest.raises(ProxyError, match=r"identifies no client, because session\.tenant is credential"):
        await forget_client(config, [field], None)
    assert await left(tmp_path / "s.db", keys) == ["a1", "a2", "b1"]


async def test_a_header_that_names_no_session_is_an_error(tmp_path: Path) -> None:
    config, keys = await stored(tmp_path / "s.db")
    with pytest.raises(ProxyError, match="does not contain this header"):
        await forget_client(config, ALICE, [(b"x-nothing", b"one")])
    assert await left(tmp_path / "s.db", keys) == ["a1", "a2", "b1"]
