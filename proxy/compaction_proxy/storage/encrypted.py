"""A store that encrypts every value with AES-256-GCM. A value can be neither read nor forged without a key.

An encrypted value consists of the envelope's version byte, the form byte 2, four bytes that identify the
encryption key, a nonce of twelve bytes, and the ciphertext. The store key is authenticated as associated
data, so a value that was moved to another store key does not decrypt. New values are encrypted with the first
of the configured encryption keys. Stored values are decrypted with any of these keys. To rotate keys, put a
new key first.
"""

import base64
import binascii
import hashlib
import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from compaction_proxy.core.errors import ConfigError
from compaction_proxy.storage.envelope import SEALED, VERSION
from compaction_proxy.storage.store import Lease, ListEntry, Record, Store

Item = TypeVar("Item", Record, ListEntry, Record | ListEntry)

KEY_BYTES = 32
_KEY_ID_BYTES = 4
_NONCE_BYTES = 12
_START = bytes((VERSION, SEALED))
# What `EncryptedStore` returns for a value that does not decrypt. Empty bytes are no valid envelope, so the
# caller treats the record as unreadable.
_UNREADABLE = b""


def parse_key(text: str) -> bytes:
    """Decodes an encryption key of 32 bytes from base64.

    Raises:
        ConfigError: If the text is not a key. The message does not contain the text.
    """
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError("store.encryption_keys: a key must be 32 bytes in base64 (openssl rand -base64 32)")
    return key


class EncryptedStore:
    """Implements `store.Store`: encrypts values and keeps them in another store.

    Args:
        store: The store that keeps the encrypted values.
        keys: Encryption keys of 32 bytes, the newest first; at least one.
    """

    def __init__(self, store: Store, keys: Sequence[bytes]) -> None:
        self._store = store
        self._ciphers = {hashlib.sha256(key).digest()[:_KEY_ID_BYTES]: AESGCM(key) for key in keys}
        self._newest = next(iter(self._ciphers))

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads values as `Store.read` does. Returns empty bytes for a value that does not decrypt."""
        values = await self._store.read(keys)
        return [value and self._decrypt_value(key, value) for key, value in zip(keys, values, strict=True)]

    async def commit(
        self, claim: Record, other_items: Sequence[Record | ListEntry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Encrypts the items, then commits them as `Store.commit` does.

        Returns empty bytes if a value is stored under `claim.key` already and does not decrypt.
        """
        stored = await self._store.commit(
            self._encrypt_item(claim), [self._encrypt_item(each) for each in other_items], lease=lease
        )
        return stored and self._decrypt_value(claim.key, stored)

    async def write(self, items: Sequence[Record | ListEntry]) -> None:
        """Encrypts the items, then writes them as `Store.write` does."""
        await self._store.write([self._encrypt_item(each) for each in items])

    async def read_tail(self, key: str, limit: int) -> list[bytes]:
        """Reads lines as `Store.read_tail` does. Returns empty bytes for a line that does not decrypt."""
        return [self._decrypt_value(key, line) for line in await self._store.read_tail(key, limit)]

    async def acquire_lease(self, key: str, ttl_s: float) -> Lease | None:
        """Acquires a lease as `Store.acquire_lease` does."""
        return await self._store.acquire_lease(key, ttl_s)

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Renews a lease as `Store.renew_lease` does."""
        return await self._store.renew_lease(lease, ttl_s)

    async def release_lease(self, lease: Lease) -> None:
        """Releases a lease as `Store.release_lease` does."""
        await self._store.release_lease(lease)

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes keys as `Store.delete_prefix` does."""
        return await self._store.delete_prefix(prefix)

    async def publish(self, channel: str, message: bytes) -> None:
        """Encrypts a message, then publishes it as `Store.publish` does."""
        await self._store.publish(channel, self._encrypt_item(Record(channel, message, math.inf)).value)

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Yields messages as `Store.listen` does. Yields empty bytes for a message that does not decrypt."""
        async with aclosing(self._store.listen(channel)) as messages:
            async for message in messages:
                yield message and self._decrypt_value(channel, message)

    async def close(self) -> None:
        """Closes the underlying store."""
        await self._store.close()

    def _encrypt_item(self, item: Item) -> Item:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        ciphertext = self._ciphers[self._newest].encrypt(nonce, item.value, item.key.encode())
        return replace(item, value=_START + self._newest + nonce + ciphertext)

    def _decrypt_value(self, key: str, value: bytes) -> bytes:
        key_id, nonce, ciphertext = (
            value[2 : 2 + _KEY_ID_BYTES],
            value[2 + _KEY_ID_BYTES : 2 + _KEY_ID_BYTES + _NONCE_BYTES],
            value[2 + _KEY_ID_BYTES + _NONCE_BYTES :],
        )
        cipher = self._ciphers.get(key_id) if value[:2] == _START else None
        if cipher is None:
            return _UNREADABLE
        try:
            return cipher.decrypt(nonce, ciphertext, key.encode())
        except (InvalidTag, ValueError):
            return _UNREADABLE
