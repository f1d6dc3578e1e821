"""Digests of message parts that are not text. The same content has the same digest on every wire."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from compaction_proxy.wires.json import large


def hash_text(text: str) -> bytes:
    """Returns the SHA-256 of a text, which may hold lone surrogates."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def hash_address(url: str) -> bytes:
    """Returns the SHA-256 that identifies the content of a URL.

    It is computed from the decoded bytes of base64 data, from an HTTP URL without its query, and from the
    text of any other URL.
    """
    if url.startswith(("http://", "https://")):
        return hash_text(url.partition("?")[0])
    head, comma, data = url.rpartition(",")
    if comma and not head.endswith(";base64"):
        return hash_text(url)
    try:
        return large.hash_base64(data)
    except ValueError:
        return hash_text(url)


def hash_part(part: Any) -> bytes:
    """Returns the SHA-256 of the JSON of a message part of unknown kind, without its `cache_control`."""
    plain = {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, Mapping) else part
    return hash_text(json.dumps(plain, sort_keys=True, default=str))
