"""Plays cases with the anthropic package, in an environment of its own, and prints what came of each."""

import json
import os
from typing import Any

import anthropic  # type: ignore[import-not-found] # of the runner's environment

ASKED: dict[str, Any] = {
    "model": "always",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "What was the budget?"}],
    "tools": [{"name": "open", "input_schema": {"type": "object"}}],
}


def read(message: Any) -> dict[str, Any]:
    usage = message.usage
    return {
        "id": message.id,
        "role": message.role,
        "text": "".join(block.text for block in message.content if block.type == "text"),
        "calls": [
            [block.id, block.name, block.input] for block in message.content if block.type == "tool_use"
        ],
        "finish": message.stop_reason,
        "tokens": usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens,
    }


def play(client: anthropic.Anthropic, way: str) -> dict[str, Any]:
    if way == "create":
        return read(client.messages.create(**ASKED))
    with client.messages.stream(**ASKED) as stream:
        return read(stream.get_final_message())


found = {}
for name, key in json.loads(os.environ["KEYS"]).items():
    with anthropic.Anthropic(
        base_url=os.environ["ROOT_URL"], api_key=key, max_retries=0, default_headers={"x-session-id": key}
    ) as client:
        found[name] = play(client, name.split(" ")[0])
print(json.dumps(found))  # noqa: T201 - it is what the runner is for
