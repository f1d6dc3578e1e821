"""The openai npm package through the proxy: `node/runner.mjs` plays every case, these tests look at them."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from tests.helpers import openai_node

HERE = Path(__file__).parent / "node"
CONVERSATION = Path(__file__).parents[3] / "proxy" / "compaction_proxy" / "cli" / "demo" / "conversation.json"
PLAY_TIMEOUT_S = 50

HELLO = 'You said "Say héllo 🙂". I was sent 1 messages.'
CALLS = [["search", '{"query": "Grüße"}'], ["open", '{"path": "a/b.py"}']]
ALWAYS = {
    "status", "session", "strategy", "messages-before", "messages-after", "tokens-before", "tokens-after",
    "tokens-saved", "context-limit", "until-trigger-percent", "overhead-ms", "round", "request-id",
}  # fmt: skip
GATED = {"x-compaction-status": "none", "x-compaction-reason": "small", "x-compaction-session": ANY}


@pytest.fixture(scope="session")
def play(stack: Any, unreachable: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What came of every case, by its name: `came` or `threw`."""
    told = {"ROOT_URL": stack.root, "UNREACHABLE_URL": unreachable.root, "API_KEY": "node"}
    folder = tmp_path_factory.mktemp("node")
    printed = openai_node.play(
        HERE / "runner.mjs", folder, PLAY_TIMEOUT_S, **told, CONVERSATION=str(CONVERSATION)
    )
    return json.loads(printed)


@pytest.fixture(scope="session")
def came(play: Any) -> Any:
    """What came of a case."""

    def of(name: str) -> Any:
        assert "threw" not in play[name], play[name]["threw"]
        return play[name]["came"]

    return of


def shown(report: dict[str, str]) -> set[str]:
    return {name.removeprefix("x-compaction-") for name in report}


def test_every_case_was_played_to_its_end(play: Any) -> None:
    assert {name: found["threw"] for name, found in play.items() if "threw" in found} == {}


def test_a_plain_answer_arrives(came: Any) -> None:
    assert came("plain") == {"text": HELLO, "finish": "stop", "counted": True}


@pytest.mark.parametrize("case", ["streamed", "stream_helper", "without_v1", "azure"])
def test_an_answer_arrives_whichever_way_it_is_asked_for(came: Any, case: str) -> None:
    assert came(case) == HELLO


def test_usage_arrives_where_it_was_asked_for(came: Any) -> None:
    assert came("usage") is True


def test_parallel_tool_calls_are_made_and_answered(came: Any) -> None:
    text = 'The tool returned "result open". I was sent 4 messages.'
    assert came("tools") == {"finish": "tool_calls", "calls": CALLS, "text": text}
    assert came("tools_streamed") == CALLS


def test_raw_responses_show_every_header(came: Any, greeting: str) -> None:
    assert came("raw") == {
        "text": greeting,
        "cookies": ["a=1; Path=/", "b=2; Path=/"],
        "limit": "149",
        "report": GATED,
        "request_id": "req_200",
    }
    assert came("response") == {"report": GATED, "last": "data: [DONE]"}


@pytest.mark.parametrize("case", ["unicode", "zipped", "zipped_stream"])
def test_text_survives_however_it_is_sliced_or_packed(came: Any, greeting: str, case: str) -> None:
    assert came(case) == greeting


def test_structured_output_is_parsed(came: Any) -> None:
    assert came("parsed") == {"city": "Zürich", "degrees": 21}


@pytest.mark.parametrize("suffix", ["", " streamed"])
@pytest.mark.parametrize(
    ("answer", "kind", "status", "code"),
    [
        ("bad-request", "BadRequestError", 400, "scripted_code"),
        ("unauthorized", "AuthenticationError", 401, "invalid_api_key"),
        ("not-found", "NotFoundError", 404, "model_not_found"),
        ("limited", "RateLimitError", 429, "rate_limit_exceeded"),
        ("server-error", "InternalServerError", 500, None),
    ],
)
def test_an_upstream_error_arrives_as_it_is(
    came: Any, answer: str, kind: str, status: int, code: str | None, suffix: str
) -> None:
    message = f"Scripted {status}."
    assert came("errors")[answer + suffix] == {
        "kind": kind,
        "status": status,
        "body": {"message": message, "type": "scripted", "param": "messages", "code": code},
        "report": GATED,
        "message": f"{status} {message}",
    }


def test_a_retry_waits_as_long_as_the_upstream_says(came: Any, stack: Any) -> None:
    assert came("retried") == {"finish": "stop", "waited": True}
    assert [seen.all("x-stainless-retry-count") for seen in stack.seen("node-retried")] == [["0"], ["1"]]


def test_what_can_never_fit_is_the_upstream_s_refusal(came: Any) -> None:
    refused = came("too_long")
    assert (refused["kind"], refused["body"]["code"]) == ("BadRequestError", "context_length_exceeded")
    assert refused["report"]["x-compaction-status"] == "over-limit"


def test_an_unreachable_upstream_is_an_error_in_openai_s_shape(came: Any) -> None:
    message = "The upstream cannot be reached."
    assert came("unreachable") == {
        "kind": "InternalServerError",
        "status": 502,
        "body": {
            "message": message, "type": "upstream_error", "param": None, "code": "upstream_unreachable"
        },
        "report": GATED,
        "message": f"502 {message}",
    }  # fmt: skip


@pytest.mark.parametrize("case", ["cut", "cut_stream"])
def test_a_cut_stays_a_cut(came: Any, case: str) -> None:
    assert came(case)["status"] is None


def test_an_error_within_a_stream_throws_with_the_upstream_s_words(came: Any) -> None:
    assert came("error_frame")["body"] == {
        "message": "Scripted trouble.",
        "type": "server_error",
        "code": "overloaded",
    }


def test_the_sdk_s_own_time_limit_holds(came: Any) -> None:
    assert came("timeout")["kind"] == "APIConnectionTimeoutError"


def test_aborting_throws_what_the_sdk_throws(came: Any) -> None:
    assert came("aborted_before_the_first_byte")["kind"] == "APIUserAbortError"
    assert came("aborted_stream") == 3


@pytest.mark.parametrize(
    "case", ["timeout", "aborted_before_the_first_byte", "aborted_stream", "left_stream"]
)
def test_leaving_ends_the_upstream_call(came: Any, stack: Any, case: str) -> None:
    assert came(case)
    [seen] = stack.seen(f"node-{case}")
    assert (seen.ended, seen.departed) == (True, True)


def test_other_paths_are_relayed(came: Any, stack: Any) -> None:
    found = came("relayed")
    assert "demo-agent" in found.pop("models")
    assert found == {"embedding": [0.5, -1], "stored": True, "content": 60_000}
    assert [seen.target for seen in stack.seen("node-relayed")] == [
        "/v1/models",
        "/v1/embeddings",
        "/v1/files",
        "/v1/files/file-1/content",
    ]


def test_a_compacted_answer_and_a_compacted_error_carry_the_whole_report(came: Any) -> None:
    found = came("compacted")
    assert (found["report"]["x-compaction-status"], shown(found["report"])) == ("applied", ALWAYS)
    after = found["report"]["x-compaction-messages-after"]
    assert found["text"] == f'You said "What now?". I was sent {after} messages.'
    refused = came("compacted_error")
    assert (refused["status"], shown(refused["report"])) == (500, ALWAYS)


def test_the_client_chooses_how_it_is_treated(came: Any) -> None:
    assert came("modes") == {"bypass": "bypassed", "shadow": "shadow", "force": "applied"}
    assert came("invalid_mode")["body"]["code"] == "invalid_compaction_header"


def test_a_conversation_that_outgrows_the_window_goes_on(came: Any, whole_history: Any) -> None:
    found = came("conversation")
    assert found["messages"] == whole_history
    assert found["statuses"] == ["applied", "none", "reused", "scheduled"]
