"""What the demo provider binds thoughts to on the Messages wire: all that stood before them.

Newer Claude models, asked to think as they see fit, take a thought back only behind the system prompt, the
tools and the blocks that it was produced behind, earlier thoughts included; older ones, told how much to
think (`enabled`), take it back anywhere. A thought that is left out is missed by neither kind. Where marks
for the cache stand, and whether neighbours of one role are one message, is no difference.
Source: Anthropic's documentation of preserved thinking, 2026-11.
"""

import hashlib
from collections.abc import Iterator

from compaction_proxy.cli.demo.chat import JsonObject, dumps
from compaction_proxy.cli.demo.messages_reading import blocks, system_blocks


def _thinking(body: JsonObject) -> JsonObject:
    given = body.get("thinking")
    return given if isinstance(given, dict) else {}


def binds(body: JsonObject) -> bool:
    """Whether the model that is asked binds its thoughts."""
    return _thinking(body).get("type") != "enabled"


def refuses(body: JsonObject) -> bool:
    """Whether a thought behind another beginning is refused, and not dropped."""
    wanted = _thinking(body).get("block_binding")
    dropped = isinstance(wanted, dict) and wanted.get("prefix_mismatch_behavior") == "drop_block"
    return binds(body) and not dropped


def _unmarked(value: object) -> object:
    if isinstance(value, dict):
        return {key: _unmarked(each) for key, each in value.items() if key != "cache_control"}
    return [_unmarked(each) for each in value] if isinstance(value, list) else value


def _chained(digest: bytes, value: object) -> bytes:
    return hashlib.sha256(digest + dumps(_unmarked(value))).digest()


def _told(block: JsonObject) -> JsonObject:
    """A block as it is compared: a tool result's text is the same as one block of it."""
    return {**block, "content": blocks(block)} if block["type"] == "tool_result" else block


def beginnings(body: JsonObject) -> Iterator[tuple[str, JsonObject, bytes]]:
    """Each block with where it stands and the digest of all before it; last, without a block, the whole."""
    digest = _chained(b"", [system_blocks(body), body.get("tools") or []])
    for index, message in enumerate(body["messages"]):
        for at, block in enumerate(blocks(message)):
            yield f"messages.{index}.content.{at}", block, digest
            digest = _chained(digest, [message["role"], _told(block)])
    yield "", {}, digest


def beginning(body: JsonObject) -> bytes:
    """What the thought of an answer is bound to; nothing where thoughts are not bound."""
    if not binds(body):
        return b""
    *_, (_, _, digest) = beginnings(body)
    return digest
