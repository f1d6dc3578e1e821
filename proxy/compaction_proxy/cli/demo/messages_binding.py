"""What the demo provider binds thoughts to on the Messages wire: all that stood before them.

Newer Claude models, asked to think as they see fit, take a thought back only behind the system prompt, the
tools and the blocks that it was produced behind, earlier thoughts included; older ones, told how much to
think (`enabled`), take it back anywhere. A thought that is left out is missed by neither kind. Where marks
for the cache stand, and whether neighbours of one role are one message, is no difference.
Source: Anthropic's documentation of preserved thinking, 2026-11.
"""

import hashlib
from collections.abc import Iterator

from compaction_proxy.cli.demo.chat import JsonObject, encode_json
from compaction_proxy.cli.demo.messages_reading import get_blocks, get_system_blocks


def _get_thinking(body: JsonObject) -> JsonObject:
    given = body.get("thinking")
    return given if isinstance(given, dict) else {}


def has_bound_thoughts(body: JsonObject) -> bool:
    """Whether the model that is asked binds its thoughts."""
    return _get_thinking(body).get("type") != "enabled"


def should_refuse_moved_thoughts(body: JsonObject) -> bool:
    """Whether a thought behind another beginning is refused, and not dropped."""
    wanted = _get_thinking(body).get("block_binding")
    dropped = isinstance(wanted, dict) and wanted.get("prefix_mismatch_behavior") == "drop_block"
    return has_bound_thoughts(body) and not dropped


def _strip_cache_marks(value: object) -> object:
    if isinstance(value, dict):
        return {key: _strip_cache_marks(each) for key, each in value.items() if key != "cache_control"}
    return [_strip_cache_marks(each) for each in value] if isinstance(value, list) else value


def _extend_digest(digest: bytes, value: object) -> bytes:
    return hashlib.sha256(digest + encode_json(_strip_cache_marks(value))).digest()


def _normalize_block(block: JsonObject) -> JsonObject:
    """A block as it is compared: a tool result's text is the same as one block of it."""
    return {**block, "content": get_blocks(block)} if block["type"] == "tool_result" else block


def iter_prefixes(body: JsonObject) -> Iterator[tuple[str, JsonObject, bytes]]:
    """Each block with where it stands and the digest of all before it; last, without a block, the whole."""
    digest = _extend_digest(b"", [get_system_blocks(body), body.get("tools") or []])
    for index, message in enumerate(body["messages"]):
        for at, block in enumerate(get_blocks(message)):
            yield f"messages.{index}.content.{at}", block, digest
            digest = _extend_digest(digest, [message["role"], _normalize_block(block)])
    yield "", {}, digest


def compute_prefix_digest(body: JsonObject) -> bytes:
    """What the thought of an answer is bound to; nothing where thoughts are not bound."""
    if not has_bound_thoughts(body):
        return b""
    *_, (_, _, digest) = iter_prefixes(body)
    return digest
