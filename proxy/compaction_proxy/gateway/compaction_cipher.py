"""Encrypts the content of the proxy's compaction items with AES-256-GCM, with the tenant as associated data.

The encrypted bytes consist of four bytes that identify the key, a nonce of twelve bytes, and the ciphertext
with its tag. Each key is derived from one of the installation's secrets, because that secret is also used for
other purposes.
"""

import hashlib
import hmac
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_PURPOSE = b"compaction item v1"
_NAME_BYTES = 4
_NONCE_BYTES = 12


def encrypt_item(secret: bytes, tenant: str, plain: bytes) -> bytes:
    """Returns the encrypted bytes, which are 32 bytes longer than the plain ones.

    Args:
        secret: One of the installation's secrets.
        tenant: The tenant that owns the item. The item can be decrypted only for this tenant.
        plain: The bytes to encrypt.
    """
    key = _derive_key(secret)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return _compute_key_id(key) + nonce + AESGCM(key).encrypt(nonce, plain, tenant.encode())


def decrypt_item(secret: bytes, tenant: str, ciphertext: bytes) -> bytes | None:
    """Returns the plain bytes, or None if the ciphertext cannot be decrypted.

    Decryption fails if the bytes were encrypted with another secret or for another tenant, or were altered.
    """
    key = _derive_key(secret)
    if ciphertext[:_NAME_BYTES] != _compute_key_id(key):
        return None
    nonce_end = _NAME_BYTES + _NONCE_BYTES
    try:
        return AESGCM(key).decrypt(ciphertext[_NAME_BYTES:nonce_end], ciphertext[nonce_end:], tenant.encode())
    except (InvalidTag, ValueError):
        return None


def _derive_key(secret: bytes) -> bytes:
    return hmac.digest(secret, _PURPOSE, "sha256")


def _compute_key_id(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()[:_NAME_BYTES]
