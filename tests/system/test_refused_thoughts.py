"""A request of nothing but thoughts, which the provider refuses: the client gets that refusal."""

import json
from pathlib import Path

from tests.system.black_box import Provider, Received, Reply, run_proxy

PATH = "/v1/messages"
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}


def refuse(request: Received) -> Reply:
    """The refusal of a thought that was changed, or of a list with no messages."""
    if request.method == "GET":
        return Reply(404)
    signed = "messages.0.content.0: Invalid `signature` in `thinking` block"
    words = signed if request.json()["messages"] else "messages: at least one message is required"
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": words}}
    return Reply(400, json.dumps(error).encode())


def test_a_refused_list_of_nothing_but_thoughts_is_not_sent_again_as_an_empty_one(tmp_path: Path) -> None:
    provider = Provider(refuse)
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "assistant", "content": [THOUGHT]}]}
    try:
        with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
            reply = client.post(PATH, json=body)
    finally:
        provider.close()
    assert "Invalid `signature`" in reply.text
    assert [each.json() for each in provider.received if each.method == "POST"] == [body]
