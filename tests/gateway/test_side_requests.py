"""Each client is recognised by what it really sends, and side calls by their signs."""

import json
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.config.config import Config
from compaction_proxy.gateway.identity import IdentityResolver, derive_conversation_id, find_conversation_hint
from compaction_proxy.gateway.side_requests import (
    CLASS_HEADER,
    SideRequestDetector,
    SideRequestKind,
    classify_side_request,
)

CLIENTS = json.loads((Path(__file__).parents[1] / "fixtures" / "client_headers.json").read_text())
ID = "0199a213-81c2-7800-8aa1-bbab2a035a53"
SECRET = b"secret"


def whose(**session: Any) -> IdentityResolver:
    return IdentityResolver(
        Config.model_validate({"session": session}), "https://api.openai.com:443", lambda: SECRET
    )


async def found(
    told: IdentityResolver, headers: dict[str, str], body: dict[str, Any]
) -> tuple[str, str | None]:
    """The tenant and the conversation."""
    fields = [(name.encode(), value.replace("ID", ID).encode()) for name, value in headers.items()]
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body})
    who, _ = await told.complete_identity_and_classify(
        told.identify_client(fields), raw.replace("ID", ID).encode(), dict(fields)
    )
    return who.tenant, who.conversation


@pytest.mark.parametrize("client", CLIENTS, ids=[each["client"] for each in CLIENTS])
async def test_a_client_is_recognised_by_what_it_sends(client: dict[str, Any]) -> None:
    tenant, conversation = await found(whose(), client["headers"], client["body"])

    lane = [b"LANE"] if client.get("lane") else []
    kind = client["kind"]
    assert conversation == (
        derive_conversation_id(SECRET, tenant, kind, ID.encode(), *lane) if kind else None
    )


async def test_what_is_configured_wins_in_its_order() -> None:
    headers = {"x-session-id": "ID", "x-ticket": "7", "x-case": "8"}

    tenant, conversation = await found(whose(headers=["x-case", "x-ticket"]), headers, {})

    assert conversation == derive_conversation_id(SECRET, tenant, "x-case", b"8")


async def test_a_body_names_nothing_where_a_header_does_or_where_it_is_not_asked() -> None:
    body = {"metadata": {"session_id": "other"}}

    tenant, by_header = await found(whose(), {"x-session-id": "ID"}, body)
    _, unasked = await found(whose(body_hints=False), {}, body)

    assert (by_header, unasked) == (derive_conversation_id(SECRET, tenant, "x-session-id", ID.encode()), None)


async def test_a_lane_is_one_whatever_names_its_session() -> None:
    body = {"metadata": {"session_id": "s"}}

    tenant, lane = await found(whose(), {"x-claude-code-agent-id": "a"}, body)
    _, main = await found(whose(), {}, body)

    assert (lane, main) == (
        derive_conversation_id(SECRET, tenant, "metadata.session_id", b"s", b"a"),
        derive_conversation_id(SECRET, tenant, "metadata.session_id", b"s"),
    )


async def test_a_large_body_names_the_same_conversation_as_a_small_one() -> None:
    small = {"metadata": {"thread_id": "t"}}

    assert await found(whose(), {}, small) == await found(whose(), {}, {**small, "padding": "x" * 300_000})


def test_metadata_as_long_as_openai_takes_it_names_a_session() -> None:
    values = {f"{n:064}": "v" * 512 for n in range(15)}

    assert find_conversation_hint(json.dumps({"metadata": {**values, "session_id": ID}}).encode()) == (
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
    assert find_conversation_hint(body) is None


TITLE: dict[str, Any] = {"messages": [{"role": "user", "content": 'Name this: "tools", "assistant"'}]}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "run"}}]}
SUMMARY_PROMPT = "You are a context summarization assistant. Produce a structured summary."
HISTORY = {"role": "user", "content": "<conversation>\n[User]: Go on.\n[Assistant]: Yes.\n" * 1_000}
ANSWERED = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
CALLED = {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]}


@pytest.mark.parametrize(
    ("body", "kind", "tooled", "expected"),
    [
        ({**TITLE, "max_tokens": 1}, b"", False, SideRequestKind.ALONE),
        ({**TITLE, "max_completion_tokens": 1, **TOOLS}, b"", False, SideRequestKind.ALONE),
        ({**TITLE, "max_output_tokens": 1}, b"", False, SideRequestKind.ALONE),
        ({**ANSWERED, "max_tokens": 1}, b"", False, SideRequestKind.WITHIN),
        ({**TITLE, "max_tokens": 16}, b"", False, None),
        ({**TITLE, "extra": {"max_tokens": 1}}, b"", False, None),
        ({**ANSWERED, "max_tokens": 1, "padding": "x" * 2_048}, b"", False, None),
        (TITLE, b"", True, SideRequestKind.ALONE),
        (TITLE, b"", False, None),
        ({**TITLE, **TOOLS}, b"", True, None),
        (ANSWERED, b"", True, None),
        (CALLED, b"", True, None),
        ({**TITLE, "padding": "x" * 16_384}, b"", True, None),
        (
            {"messages": [{"role": "system", "content": SUMMARY_PROMPT}, HISTORY]},
            b"",
            False,
            SideRequestKind.ALONE,
        ),
        ({"messages": [HISTORY], "system": SUMMARY_PROMPT}, b"", False, SideRequestKind.ALONE),
        (
            {"input": [{"role": "system", "content": SUMMARY_PROMPT}, HISTORY]},
            b"",
            False,
            SideRequestKind.ALONE,
        ),
        ({"input": [HISTORY], "instructions": f"Quote: {SUMMARY_PROMPT}"}, b"", False, None),
        ({"messages": [HISTORY], "system": SUMMARY_PROMPT, **TOOLS}, b"", False, None),
        (TITLE, b"auxiliary", False, SideRequestKind.ALONE),
        ({**ANSWERED, **TOOLS}, b"auxiliary", False, SideRequestKind.WITHIN),
        ({**ANSWERED, **TOOLS}, b"compaction", True, None),
        (TITLE, b"main", False, None),
    ],
)
def test_a_side_call_is_told_by_its_signs(
    body: dict[str, Any], kind: bytes, tooled: Any, expected: SideRequestKind | None
) -> None:
    assert classify_side_request(json.dumps(body).encode(), kind, has_tools=tooled) is expected


def test_tools_are_looked_for_in_the_first_requests_of_a_conversation() -> None:
    calls = SideRequestDetector()
    plain, tooled = json.dumps(ANSWERED).encode(), json.dumps({**ANSWERED, **TOOLS}).encode()
    title = json.dumps(TITLE).encode()

    def after(conversation: str, *raws: bytes) -> SideRequestKind | None:
        for raw in raws:
            assert calls.classify_request(raw, {}, conversation) is None
        return calls.classify_request(title, {}, conversation)

    assert after("c_1", plain, tooled, plain) is SideRequestKind.ALONE
    assert after("c_2", plain, plain, plain, tooled) is None
    assert calls.classify_request(title, {CLASS_HEADER: b"auxiliary"}, None) is SideRequestKind.ALONE
