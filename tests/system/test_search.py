"""One search finds what stands deep in a long result that was removed."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.system.black_box import Provider, chat_reply, run_proxy

JsonObject = dict[str, Any]

HEADERS = {"x-session-id": "one", "authorization": "Bearer sk-search"}
FILLER = "The desk keeps a copy of every form, and the copies are sorted by the day on which they came in. "
FLIGHTS = [
    {"flight_number": f"TP{700 + number}", "seats": {"basic": number, "economy": 9}, "departs": "09:10"}
    for number in range(9)
]


def build_conversation() -> list[JsonObject]:
    """A conversation in whose beginning a tool lists flights, and then much is said."""
    function = {"name": "search_flights", "arguments": json.dumps({"origin": "LIS"})}
    call = {"id": "call_1", "type": "function", "function": function}
    talk = [
        {"role": role, "content": f"{number}. {FILLER * 30}"}
        for number in range(20)
        for role in ("user", "assistant")
    ]
    return [
        {"role": "user", "content": "Which flights leave Lisbon?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(FLIGHTS)},
        {"role": "assistant", "content": "There are nine of them."},
        *talk,
        {"role": "user", "content": "Good. What is the next form?"},
    ]


def search(client: httpx.Client, query: str) -> str:
    """What `memory_search` answers over MCP."""
    call = {"name": "memory_search", "arguments": {"query": query}}
    got = client.post(
        "/mcp",
        json={"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call},
        headers={**HEADERS, "accept": "application/json, text/event-stream"},
    )
    assert got.status_code == 200, got.text
    return "\n".join(part["text"] for part in got.json()["result"]["content"])


def test_one_search_for_a_key_and_a_tool_shows_the_values_of_a_long_result(tmp_path: Path) -> None:
    provider = Provider(chat_reply)
    config = {"models": {"m": {"window": 12_000}}, "summary": {"model": "none"}}
    try:
        with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
            body = {"model": "m", "messages": build_conversation()}
            sent = client.post("/v1/chat/completions", json=body, headers=HEADERS)
            assert sent.headers["x-compaction-status"] == "applied", sent.headers
            found = search(client, "search flights flight number")
    finally:
        provider.close()
    assert [each["flight_number"] for each in FLIGHTS if str(each["flight_number"]) not in found] == []
