"""The engine knows no wire: what is one wire's alone stands in no string of the core, and in no import."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.source import parse_source

PACKAGE = Path(__file__).resolve().parents[2] / "proxy" / "compaction_proxy"
# Names of fields, of kinds and of roles that only some wires have, and that are no word of ours.
WORDS = frozenset(
    {"tool_calls", "tool_call_id", "function_call", "function_call_output", "custom_tool_call", "call_id"}
    | {"tool_use", "tool_use_id", "tool_result", "server_tool_use", "input_schema", "function", "choices"}
    | {"input_text", "output_text", "input_image", "image_url", "input_audio", "file_data"}
    | {"max_tokens", "max_output_tokens", "max_completion_tokens", "finish_reason", "stop_reason"}
    | {"reasoning_content", "encrypted_content", "redacted_thinking", "cache_control"}
    | {"previous_response_id", "context_management", "input_tokens"}
)
# What is known of chat: the older role of results, which takes part in digests; and how an answer to a
# summary call says that it is cut. And a tag in which some clients write results as text, on any wire.
KNOWN = {
    "client_forms": {"tool_result"},
    "answer": {"max_tokens", "max_output_tokens"},
    "digest": {"function"},
    "facts": {"function"},
    "repair": {"function"},
    "token_rules": {"function"},
}
# Wires whose rounds are made like those of any other.
OTHERS = ("compaction_proxy.wires.responses", "compaction_proxy.wires.messages")


def _strings(path: Path) -> Iterator[str]:
    """All strings of a module, docstrings too: they are more than a word."""
    for node in ast.walk(parse_source(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            value = node.value
            yield value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parse_source(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_the_core_names_nothing_that_is_one_wire_s() -> None:
    found = {
        path.stem: {word.strip('"') for word in _strings(path)} & WORDS
        for path in (PACKAGE / "core").rglob("*.py")
    }
    assert {name: words for name, words in found.items() if words} == KNOWN


def test_compaction_imports_no_wire_but_the_one_it_speaks_itself() -> None:
    folders = ("core", "compaction", "recall", "storage")
    found = {
        path.name: imported
        for folder in folders
        for path in (PACKAGE / folder).rglob("*.py")
        for imported in _imported(path)
        if imported.startswith(OTHERS)
    }
    assert found == {}
