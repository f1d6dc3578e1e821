"""What the demo provider signs, so that it knows its own thoughts again and refuses altered ones.

The key is no secret: it tells honest bytes from altered ones, so tests may sign as well.
"""

import base64
import binascii
import hashlib
import hmac

_KEY = b"compaction-proxy demo provider"
_MARK = "demo"
_CODE_BYTES = 16


def _compute_code(data: bytes) -> bytes:
    return hmac.digest(_KEY, data, hashlib.sha256)[:_CODE_BYTES]


def sign_thought(thought: str, bound: bytes = b"") -> str:
    """The signature of a thinking block that says `thought`, bound to the digest of what stands before it."""
    data = thought.encode("utf-8", "surrogatepass")
    return _MARK + base64.b64encode(_compute_code(bound + data) + bound).decode()


def read_binding(thought: str, signed: object) -> bytes | None:
    """What a thinking block is bound to: nothing if it may stand anywhere, None if its signature is wrong."""
    if not isinstance(signed, str) or not signed.startswith(_MARK):
        return None
    try:
        bound = base64.b64decode(signed.removeprefix(_MARK), validate=True)[_CODE_BYTES:]
    except binascii.Error:
        return None
    return bound if hmac.compare_digest(signed.encode(), sign_thought(thought, bound).encode()) else None


def seal_thought(thought: str) -> str:
    """`thought` as text that nobody else can write: encrypted reasoning, or data of redacted thinking."""
    data = thought.encode("utf-8", "surrogatepass")
    return _MARK + base64.b64encode(_compute_code(data) + data).decode()


def is_sealed(text: object) -> bool:
    """Whether `seal_thought` has written it."""
    if not isinstance(text, str) or not text.startswith(_MARK):
        return False
    try:
        data = base64.b64decode(text.removeprefix(_MARK), validate=True)
    except binascii.Error:
        return False
    return hmac.compare_digest(data[:_CODE_BYTES], _compute_code(data[_CODE_BYTES:]))
