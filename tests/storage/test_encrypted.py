import base64
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.errors import ConfigError
from compaction_proxy.storage.encrypted import EncryptedStore, parse_key
from compaction_proxy.storage.envelope import pack, unpack
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.store import ListEntry, Record

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
KEY = "v1:{t.r}:checkpoint:chained:00"
LIST = "v1:{t.r}:rounds"


async def test_what_is_written_is_read_back_by_every_way() -> None:
    store = EncryptedStore(MemoryStore(), [OLD])
    first = await store.commit(Record(KEY, b"one", 60), [ListEntry(LIST, b"line", 60, 5)])
    second = await store.commit(Record(KEY, b"two", 60))
    assert (first, second) == (b"one", b"one")
    assert await store.read([KEY, "v1:{t.r}:absent"]) == [b"one", None]
    assert await store.read_tail(LIST, 5) == [b"line"]


async def test_nothing_that_was_written_can_be_found_in_the_store() -> None:
    planted = [secrets.token_hex(8) for _ in range(1_000)]
    inner = MemoryStore()
    store = EncryptedStore(inner, [OLD])
    for index, word in enumerate(planted):
        await store.write([Record(f"v1:{{t.r}}:conversation:{index}", pack({"text": word * 3}), 60)])
        await store.write([ListEntry(LIST, pack({"text": word}), 60, 2_000)])
    held = await inner.read([f"v1:{{t.r}}:conversation:{index}" for index in range(1_000)])
    dump = b"".join(value or b"" for value in held) + b"".join(await inner.read_tail(LIST, 2_000))
    assert len(dump) > 100_000
    assert not [word for word in planted if word.encode() in dump or word[:8].encode() in dump]


async def test_a_new_key_put_first_seals_and_the_old_one_still_opens() -> None:
    inner = MemoryStore()
    await EncryptedStore(inner, [OLD]).write([Record(KEY, b"old", 60)])
    rotated = EncryptedStore(inner, [NEW, OLD])
    await rotated.write([Record(KEY + "1", b"new", 60)])
    assert await rotated.read([KEY, KEY + "1"]) == [b"old", b"new"]
    assert await EncryptedStore(inner, [NEW]).read([KEY, KEY + "1"]) == [b"", b"new"]


async def test_a_value_moved_to_another_key_does_not_open() -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, [OLD])
    await store.write([Record(KEY, b"mine", 60)])
    [value] = await inner.read([KEY])
    assert value is not None
    await inner.write([Record(KEY + "1", value, 60)])
    assert await store.read([KEY + "1"]) == [b""]


async def test_a_value_that_was_never_sealed_is_not_believed() -> None:
    inner = MemoryStore()
    await inner.write([Record(KEY, pack({"forged": True}), 60)])
    assert await EncryptedStore(inner, [OLD]).read([KEY]) == [b""]


async def test_every_flipped_byte_is_a_miss() -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, [OLD])
    await store.write([Record(KEY, pack({"a": 1}), 60)])
    [value] = await inner.read([KEY])
    assert value is not None
    for index in range(len(value)):
        flipped = value[:index] + bytes([value[index] ^ 1]) + value[index + 1 :]
        await inner.write([Record(KEY, flipped, 60)])
        [opened] = await store.read([KEY])
        assert opened is not None
        assert unpack(opened) is None


@given(st.binary(max_size=64))
async def test_whatever_stands_in_the_store_is_read_without_an_error(value: bytes) -> None:
    inner = MemoryStore()
    await inner.write([Record(KEY, value, 60)])
    assert await EncryptedStore(inner, [OLD]).read([KEY]) == [b""]


@pytest.mark.parametrize("text", ["", "short", base64.b64encode(b"x" * 31).decode(), "ü" * 44])
def test_a_key_that_is_none_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_key(text)
    assert not text or text not in str(caught.value)


def test_a_key_is_thirty_two_bytes_in_base64() -> None:
    assert parse_key(base64.b64encode(OLD).decode()) == OLD
