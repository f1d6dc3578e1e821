"""Encodes the list of the demo provider's models in the formats of the wires."""

from collections.abc import Sequence

from compaction_proxy.cli.demo.chat import JsonObject, encode_json


def encode_openai_models(names: Sequence[str], window: int) -> bytes:
    """Encodes the list for clients of the Chat Completions and Responses wires.

    `window` is the context window of all models, in tokens.
    """
    row: JsonObject = {"object": "model", "created": 0, "owned_by": "demo", "context_window": window}
    return encode_json({"object": "list", "data": [{"id": name, **row} for name in names]})


def encode_anthropic_models(names: Sequence[str], window: int) -> bytes:
    """Encodes the list for clients of the Messages wire, as a single page.

    `window` is the context window of all models, in tokens.
    """
    row = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "max_input_tokens": window}
    data = [{"id": name, "display_name": name, **row} for name in names]
    return encode_json({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
