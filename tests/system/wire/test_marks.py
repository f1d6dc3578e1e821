"""What is asked of a conversation through the admin API reaches its next request, however small that is."""

from typing import Any

CHAT = "/v1/chat/completions"
SESSION = "x-session-id: s"


async def test_a_conversation_that_passes_the_gate_is_compacted_when_that_was_asked_for(wire: Any) -> None:
    async def script(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    said = [
        {"role": role, "content": f"{role} tells of step {at}: " + "alpha beta " * 60}
        for at in range(6)
        for role in ("user", "assistant")
    ]
    small = wire.chat_body(messages=[*said, {"role": "user", "content": "And now?"}])
    async with wire.running_upstream(script) as upstream, wire.running_proxy(upstream.port) as port:

        async def asked(*fields: str) -> dict[str, str]:
            return dict(wire.status_of_ours(await wire.ask(port, wire.post(CHAT, small, SESSION, *fields))))

        [past_the_gate] = wire.ways["past the gate"]
        name = (await asked(past_the_gate))["session"]
        path = f"/admin/v1/conversations/{name}/compact"
        before = await asked()
        marked = await wire.ask(port, wire.post(path, b"").replace(b"host: proxy", b"host: localhost"))
        compacted, after = await asked(), await asked()
    assert (before, marked.status) == ({"status": "none", "reason": "small", "session": name}, 202)
    assert (compacted["status"], compacted["round"]) == ("applied", "1")
    assert (after["status"], after["round"]) == ("reused", "1")
    sizes = [len(seen.body) for seen in upstream.seen]
    assert sizes[:2] == [len(small)] * 2
    assert sizes[2] == sizes[3] < len(small)
