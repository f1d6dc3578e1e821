"""Computes what the demo provider binds thoughts to on the Messages wire: everything that precedes them.

Newer Claude models with adaptive thinking accept a thought only behind the same system prompt, tools and
blocks as when it was produced, earlier thoughts included. Older models, for which thinking is `enabled` with
a budget, accept it anywhere. Both kinds accept that a thought is missing. Cache marks do not count, nor does
it matter whether neighbouring messages of one role are merged.
Source: Anthropic's documentation of preserved thinking, 2026-11.
"""

import hashlib
from collections.abc import Iterator

from compaction_proxy.cli.demo.chat import JsonObject, encode_json
from compaction_proxy.cli.demo.messages_reading import get_blocks, get_system_blocks


def _get_thinking(body: JsonObject) -> JsonObject:
    thinking = body.get("thinking")
    return thinking if isinstance(thinking, dict) else {}


def has_bound_thoughts(body: JsonObject) -> bool:
    """Returns whether the requested model binds its thoughts to what precedes them."""
    return _get_thinking(body).get("type") != "enabled"


def should_refuse_moved_thoughts(body: JsonObject) -> bool:
    """Returns whether a thought behind a different prefix is refused. Otherwise it is dropped."""
    binding = _get_thinking(body).get("block_binding")
    is_dropped = isinstance(binding, dict) and binding.get("prefix_mismatch_behavior") == "drop_block"
    return has_bound_thoughts(body) and not is_dropped


def _strip_cache_marks(value: object) -> object:
    if isinstance(value, dict):
        return {key: _strip_cache_marks(each) for key, each in value.items() if key != "cache_control"}
    return [_strip_cache_marks(each) for each in value] if isinstance(value, list) else value


def _extend_digest(digest: bytes, value: object) -> bytes:
    return hashlib.sha256(digest + encode_json(_strip_cache_marks(value))).digest()


def _normalize_block(block: JsonObject) -> JsonObject:
    """Returns a block in the form that is compared: the text of a tool result becomes a text block."""
    return {**block, "content": get_blocks(block)} if block["type"] == "tool_result" else block


def iter_prefixes(body: JsonObject) -> Iterator[tuple[str, JsonObject, bytes]]:
    """Yields each block with its path and the digest of everything before it.

    The last item has an empty path, an empty block and the digest of the whole request.
    """
    digest = _extend_digest(b"", [get_system_blocks(body), body.get("tools") or []])
    for index, message in enumerate(body["messages"]):
        for position, block in enumerate(get_blocks(message)):
            yield f"messages.{index}.content.{position}", block, digest
            digest = _extend_digest(digest, [message["role"], _normalize_block(block)])
    yield "", {}, digest


def compute_prefix_digest(body: JsonObject) -> bytes:
    """Returns the digest to which the answer's thought is bound, or nothing if thoughts are not bound."""
    if not has_bound_thoughts(body):
        return b""
    *_, (_, _, digest) = iter_prefixes(body)
    return digest
