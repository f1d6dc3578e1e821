"""Computes the digests to which thoughts (thinking blocks) are bound on the Messages wire.

Such a digest covers everything that precedes the thought. Newer Claude models, which think adaptively, accept
a thought only if the system prompt, tools and blocks before it, earlier thoughts included, are the same as
when it was produced. Older models, for which a request sets thinking to `enabled` with a budget, accept a
thought anywhere. Both kinds accept a history without the thought. Cache marks are ignored, and consecutive
messages of the same role count as one message.
Source: Anthropic's documentation of preserved thinking, 2026-11.
"""

import hashlib
from collections.abc import Iterator

from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.wires.json.values import encode_json
from tests.doubles.messages_request import get_blocks, get_system_blocks


def _get_thinking(body: JsonObject) -> JsonObject:
    thinking = body.get("thinking")
    return thinking if isinstance(thinking, dict) else {}


def has_bound_thoughts(body: JsonObject) -> bool:
    """Returns whether the requested model binds its thoughts to what precedes them."""
    return _get_thinking(body).get("type") != "enabled"


def should_refuse_moved_thoughts(body: JsonObject) -> bool:
    """Returns whether a request is refused if what precedes a thought has changed.

    Otherwise the thought is accepted or ignored.
    """
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
    """Returns a block in the form that is compared: a tool result's text becomes a list with a text block."""
    return {**block, "content": get_blocks(block)} if block["type"] == "tool_result" else block


def iter_prefixes(body: JsonObject) -> Iterator[tuple[str, JsonObject, bytes]]:
    """Yields the path of each block, the block, and the digest of everything before it.

    After the last block it yields an empty path, an empty block and the digest of the whole request.
    """
    digest = _extend_digest(b"", [get_system_blocks(body), body.get("tools") or []])
    for index, message in enumerate(body["messages"]):
        for position, block in enumerate(get_blocks(message)):
            yield f"messages.{index}.content.{position}", block, digest
            digest = _extend_digest(digest, [message["role"], _normalize_block(block)])
    yield "", {}, digest


def compute_prefix_digest(body: JsonObject) -> bytes:
    """Returns the digest to which the answer's thought is bound; empty if thoughts are not bound."""
    if not has_bound_thoughts(body):
        return b""
    *_, (_, _, digest) = iter_prefixes(body)
    return digest
