"""Each client is recognised by what it really sends, and side calls by their signs."""

import json
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.config.config import Config
from compaction_proxy.gateway.identity import Whose, hint, named
from compaction_proxy.gateway.side_requests import CLASS, Side, SideCalls, side

CLIENTS = json.loads((Path(__file__).parents[1] / "fixtures" / "client_headers.json").read_text())
ID = "0199a213-81c2-7800-8aa1-bbab2a035a53"
SECRET = b"secret"


def whose(**session: Any) -> Whose:
    return Whose(Config.model_validate({"session": session}), "https://api.openai.com:443", lambda: SECRET)


async def found(told: Whose, headers: dict[str, str], body: dict[str, Any]) -> tuple[str, str | None]:
    """The tenant and the conversation."""
    fields = [(name.encode(), value.replace("ID", ID).encode()) for name, value in headers.items()]
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body})
    who, _ = await told.placed(told.of(fields, dict(fields)), raw.replace("ID", ID).encode(), dict(fields))
    return who.tenant, who.conversation


@pytest.mark.parametrize("client", CLIENTS, ids=[each["client"] for each in CLIENTS])
async def test_a_client_is_recognised_by_what_it_sends(client: dict[str, Any]) -> None:
    tenant, conversation = await found(whose(), client["headers"], client["body"])

    lane = [b"LANE"] if client.get("lane") else []
    kind = client["kind"]
    assert conversation == (named(SECRET, tenant, kind, ID.encode(), *lane) if kind else None)


async def test_what_is_configured_wins_in_its_order() -> None:
    headers = {"x-session-id": "ID", "x-ticket": "7", "x-case": "8"}

    tenant, conversation = await found(whose(headers=["x-case", "x-ticket"]), headers, {})

    assert conversation == named(SECRET, tenant, "x-case", b"8")


async def test_a_body_names_nothing_where_a_header_does_or_where_it_is_not_asked() -> None:
    body = {"metadata": {"session_id": "other"}}

    tenant, by_header = await found(whose(), {"x-session-id": "ID"}, body)
    _, unasked = await found(whose(body_hints=False), {}, body)

    assert (by_header, unasked) == (named(SECRET, tenant, "x-session-id", ID.encode()), None)


async def test_a_lane_is_one_whatever_names_its_session() -> None:
    body = {"metadata": {"session_id": "s"}}

    tenant, lane = await found(whose(), {"x-claude-code-agent-id": "a"}, body)
    _, main = await found(whose(), {}, body)

    assert (lane, main) == (
        named(SECRET, tenant, "metadata.session_id", b"s", b"a"),
        named(SECRET, tenant, "metadata.session_id", b"s"),
    )


async def test_a_large_body_names_the_same_conversation_as_a_small_one() -> None:
    small = {"metadata": {"thread_id": "t"}}

    assert await found(whose(), {}, small) == await found(whose(), {}, {**small, "padding": "x" * 300_000})


def test_metadata_as_long_as_openai_takes_it_names_a_session() -> None:
    values = {f"{n:064}": "v" * 512 for n in range(15)}

    assert hint(json.dumps({"metadata": {**values, "session_id": ID}}).encode()) == (
        "metadata.session_id",
        ID.encode(),
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"metadata": []}',
        b'{"metadata": {"session_id": 7, "user_id": "{"}}',
        b'{"metadata": {"session_id": "a\\u0007b"}}',
        b'{"metadata": {"session_id": " "}}',
        b'{"metadata": {"session_id": "' + b"x" * 257 + b'"}}',
        b'{"metadata": {"session_id": "s", "padding": "' + b"x" * 16_384 + b'"}}',
        b'{"metadata": {"session_id": ' + b"9" * 5_000 + b"}}",
        b'{"messages": [{"metadata": {"session_id": "s"}}], "tools": [{"litellm_session_id": "s"}]}',
        b'{"prompt_cache_key": "checkout-assistant-production"}',
        b'{"litellm_session_id": "\\ud800"}',
        b'{"metadata": ' + b"[" * 5_000,
    ],
)
def test_what_is_no_id_of_a_session_is_passed_over(body: bytes) -> None:
    assert hint(body) is None


TITLE: dict[str, Any] = {"messages": [{"role": "user", "content": 'Name this: "tools", "assistant"'}]}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "run"}}]}
SUMMARY_PROMPT = "You are a context summarization assistant. Produce a structured summary."
HISTORY = {"role": "user", "content": "<conversation>\n[User]: Go on.\n[Assistant]: Yes.\n" * 1_000}
ANSWERED = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
CALLED = {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]}


@pytest.mark.parametrize(
    ("body", "kind", "tooled", "expected"),
    [
        ({**TITLE, "max_tokens": 1}, b"", False, Side.ALONE),
        ({**TITLE, "max_completion_tokens": 1, **TOOLS}, b"", False, Side.ALONE),
        ({**TITLE, "max_output_tokens": 1}, b"", False, Side.ALONE),
        ({**ANSWERED, "max_tokens": 1}, b"", False, Side.WITHIN),
        ({**TITLE, "max_tokens": 16}, b"", False, None),
        ({**TITLE, "extra": {"max_tokens": 1}}, b"", False, None),
        ({**ANSWERED, "max_tokens": 1, "padding": "x" * 2_048}, b"", False, None),
        (TITLE, b"", True, Side.ALONE),
        (TITLE, b"", False, None),
        ({**TITLE, **TOOLS}, b"", True, None),
        (ANSWERED, b"", True, None),
        (CALLED, b"", True, None),
        ({**TITLE, "padding": "x" * 16_384}, b"", True, None),
        (
            {"messages": [{"role": "system", "content": SUMMARY_PROMPT}, HISTORY]},
            b"",
            False,
            Side.ALONE,
        ),
        ({"messages": [HISTORY], "system": SUMMARY_PROMPT}, b"", False, Side.ALONE),
        ({"input": [{"role": "system", "content": SUMMARY_PROMPT}, HISTORY]}, b"", False, Side.ALONE),
        ({"input": [HISTORY], "instructions": f"Quote: {SUMMARY_PROMPT}"}, b"", False, None),
        ({"messages": [HISTORY], "system": SUMMARY_PROMPT, **TOOLS}, b"", False, None),
        (TITLE, b"auxiliary", False, Side.ALONE),
        ({**ANSWERED, **TOOLS}, b"auxiliary", False, Side.WITHIN),
        ({**ANSWERED, **TOOLS}, b"compaction", True, None),
        (TITLE, b"main", False, None),
    ],
)
def test_a_side_call_is_told_by_its_signs(
    body: dict[str, Any], kind: bytes, tooled: Any, expected: Side | None
) -> None:
    assert side(json.dumps(body).encode(), kind, tooled=tooled) is expected


def test_tools_are_looked_for_in_the_first_requests_of_a_conversation() -> None:
    calls = SideCalls()
    plain, tooled = json.dumps(ANSWERED).encode(), json.dumps({**ANSWERED, **TOOLS}).encode()
    title = json.dumps(TITLE).encode()

    def after(conversation: str, *raws: bytes) -> Side | None:
        for raw in raws:
            assert calls.told(raw, {}, conversation) is None
        return calls.told(title, {}, conversation)

    assert after("c_1", plain, tooled, plain) is Side.ALONE
    assert after("c_2", plain, plain, plain, tooled) is None
    assert calls.told(title, {CLASS: b"auxiliary"}, None) is Side.ALONE
