"""A conversation is known again where its client has changed nothing that matters, on every wire."""

import json
from typing import Any

import pytest

from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.registry import WIRES

MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1, "b": 2}'}}
LISTING = "a long listing " * 40
CALL_AGAIN = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"b":2,"a":1}'}}
CLEARED = {"type": "tool_result", "tool_use_id": "c1", "content": "[cleared]"}
ASKED = {"role": "user", "content": "Look."}


def image(query: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"https://files.example/a.png?sig={query}"}}


def seen(query: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"https://files.example/a.png?sig={query}"}


def pictured(query: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": f"https://files.example/a.png?sig={query}"}}


# What a client sent, and the same as it sends it later.
SAME: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "chat": (
        [
            {"role": "user", "content": [{"type": "text", "text": "See.", **MARK}, image("1")]},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": LISTING},
            {"role": "assistant", "content": "Done.", "reasoning_content": "Well."},
        ],
        [
            {"role": "user", "content": [{"type": "text", "text": "See."}, image("2")]},
            {"role": "assistant", "content": "", "tool_calls": [CALL_AGAIN]},
            {"role": "tool", "tool_call_id": "c1", "content": "[cleared]"},
            {"role": "assistant", "content": [{"type": "text", "text": "Done.", **MARK}]},
        ],
    ),
    "responses": (
        [
            {"role": "user", "content": [{"type": "input_text", "text": "See."}, seen("1")]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "AAAA"},
            {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"a": 1, "b": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": LISTING},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Done.", "annotations": []}]},
        ],
        [
            {"role": "user", "content": [{"type": "input_text", "text": "See."}, seen("2")]},
            {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"b":2,"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "[cleared]"},
            {"role": "assistant", "content": "Done."},
        ],
    ),
    "messages": (
        [
            {"role": "user", "content": [{"type": "text", "text": "See.", **MARK}, pictured("1")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                    {"type": "tool_use", "id": "c1", "name": "ls", "input": {"a": 1, "b": 2}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": LISTING, **MARK}],
            },
            {"role": "assistant", "content": "Done."},
        ],
        [
            {"role": "user", "content": [{"type": "text", "text": "See."}, pictured("2")]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "ls", "input": {"b": 2, "a": 1}}],
            },
            {"role": "user", "content": [CLEARED]},
            {"role": "assistant", "content": [{"type": "text", "text": "Done.", **MARK}]},
        ],
    ),
}  # fmt: skip


def prefixes(wire: str, messages: list[dict[str, Any]]) -> list[bytes]:
    """Of each piece, as checkpoints are found."""
    dialect = WIRES[wire]
    raw = json.dumps({"model": "m", "max_tokens": 64, dialect.member_names.messages: messages}).encode()
    return compute_prefix_digests(
        map(dialect.parse_message, parse_body(raw, dialect).messages), dialect.digest_seed
    )


@pytest.mark.parametrize("wire", WIRES)
def test_what_means_the_same_is_the_same_prefix(wire: str) -> None:
    """Marks move, reasoning goes, old results are cleared, images are signed anew, arguments rewritten."""
    before, after = SAME[wire]
    known = prefixes(wire, before)

    assert prefixes(wire, [*after, ASKED])[: len(known)] == known
    assert len(known) == 4


@pytest.mark.parametrize("wire", WIRES)
def test_a_client_that_compacts_by_itself_begins_another_prefix(wire: str) -> None:
    before, _ = SAME[wire]
    summarised = [{"role": "user", "content": "Summary of what was before."}, *before[-1:], ASKED]

    assert set(prefixes(wire, before)).isdisjoint(prefixes(wire, summarised))


@pytest.mark.parametrize("wire", WIRES)
def test_what_a_user_has_said_otherwise_is_another_prefix(wire: str) -> None:
    before, _ = SAME[wire]
    edited = [{**before[0], "content": "See there."}, *before[1:]]

    assert set(prefixes(wire, before)).isdisjoint(prefixes(wire, edited))


def test_no_wire_finds_the_prefixes_of_another() -> None:
    found = [set(prefixes(wire, [ASKED, {"role": "assistant", "content": "Yes."}, ASKED])) for wire in WIRES]

    assert len(set().union(*found)) == sum(map(len, found))
