"""The models that the demo provider offers, as lists in the shapes of the wires."""

from collections.abc import Sequence

from compaction_proxy.cli.demo.chat import JsonObject, encode_json


def encode_openai_models(names: Sequence[str], window: int) -> bytes:
    """The list as chat and Responses clients read it; `window` in tokens."""
    row: JsonObject = {"object": "model", "created": 0, "owned_by": "demo", "context_window": window}
    return encode_json({"object": "list", "data": [{"id": name, **row} for name in names]})


def encode_anthropic_models(names: Sequence[str], window: int) -> bytes:
    """The list as Messages clients read it, on one page; `window` in tokens."""
    row = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "max_input_tokens": window}
    data = [{"id": name, "display_name": name, **row} for name in names]
    return encode_json({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
