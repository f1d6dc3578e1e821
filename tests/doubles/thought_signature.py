"""Signs and seals thoughts of the three-wire provider: it recognises its own and refuses altered ones.

A sealed thought is encoded together with its signature, in place of an encrypted one. The key is not secret,
because it only serves to detect altered bytes. Tests can sign with it, too.
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


def sign_thought(thought: str, binding: bytes = b"") -> str:
    """Returns the signature of a thinking block.

    Args:
        thought: The text of the block.
        binding: Digest of everything before the block, to which the block is bound. Empty if the block may
            occur anywhere.
    """
    data = thought.encode("utf-8", "surrogatepass")
    return _MARK + base64.b64encode(_compute_code(binding + data) + binding).decode()


def read_binding(thought: str, signature: object) -> bytes | None:
    """Checks a signature and returns the digest to which the thinking block is bound.

    The digest is empty if the block may occur anywhere. Returns None if the signature is wrong.
    """
    if not isinstance(signature, str) or not signature.startswith(_MARK):
        return None
    try:
        bound = base64.b64decode(signature.removeprefix(_MARK), validate=True)[_CODE_BYTES:]
    except binascii.Error:
        return None
    return bound if hmac.compare_digest(signature.encode(), sign_thought(thought, bound).encode()) else None


def seal_thought(thought: str) -> str:
    """Encodes a thought with a code that shows changes. It serves as encrypted or redacted reasoning."""
    data = thought.encode("utf-8", "surrogatepass")
    return _MARK + base64.b64encode(_compute_code(data) + data).decode()


def is_sealed(text: object) -> bool:
    """Returns whether `seal_thought` wrote the text."""
    if not isinstance(text, str) or not text.startswith(_MARK):
        return False
    try:
        data = base64.b64decode(text.removeprefix(_MARK), validate=True)
    except binascii.Error:
        return False
    return hmac.compare_digest(data[:_CODE_BYTES], _compute_code(data[_CODE_BYTES:]))
