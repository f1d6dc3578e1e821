from typing import Any

import pytest

from tests.doubles.messages_validation import validate_count_request, validate_request
from tests.doubles.messages_wire import check_overflow
from tests.doubles.thought_binding import compute_prefix_digest
from tests.doubles.thought_signature import seal_thought, sign_thought

USER = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "hi"}
THOUGHT = {"type": "thinking", "thinking": "so", "signature": sign_thought("so")}
THINKING = {"type": "enabled", "budget_tokens": 10}
MARK = {"cache_control": {"type": "ephemeral"}}


def calling(*ids: str, first: tuple[Any, ...] = ()) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": each, "name": "f", "input": {}} for each in ids]
    return {"role": "assistant", "content": [*first, *calls]}


def answering(*ids: str, last: tuple[Any, ...] = ()) -> dict[str, Any]:
    results = [{"type": "tool_result", "tool_use_id": each, "content": "done"} for each in ids]
    return {"role": "user", "content": [*results, *last]}


def text(said: str, **more: object) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def judged(*messages: object, **more: object) -> str | None:
    wrong = validate_request({"model": "m", "max_tokens": 9, "messages": list(messages), **more})
    return wrong.message if wrong else None


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, USER, SAID, USER],
        [USER, calling("a", "b"), answering("b", "a", last=(text("and?"),))],
        [USER, calling("a"), answering("a"), USER, SAID],
        [USER, calling("a"), calling("b"), answering("a"), answering("b")],
        [USER, calling("a", first=(THOUGHT,)), answering("a")],
        [
            USER,
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": seal_thought("so")}]},
            USER,
        ],
    ],
)
def test_a_valid_conversation_is_not_refused(messages: list[object]) -> None:
    assert judged(*messages) is None


UNANSWERED = "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: "


@pytest.mark.parametrize(
    ("messages", "beginning"),
    [
        ([], "messages: at least one message is required"),
        ([SAID], 'messages: first message must use the "user" role'),
        ([{"role": "system", "content": "x"}], 'messages: Unexpected role "system".'),
        ([{"role": "user"}], "messages.0.content: Field required"),
        ([{"role": "user", "content": ""}, SAID], "messages.0: all messages must have non-empty content"),
        ([{"role": "user", "content": [text("")]}], "messages: text content blocks must be non-empty"),
        ([{"role": "user", "content": [text(" ")]}], "messages: text content blocks must contain non-white"),
        ([USER, {"role": "assistant", "content": "hi "}], "messages: final assistant content cannot end"),
        ([USER, calling("a")], UNANSWERED + "a."),
        ([USER, calling("a", "b"), answering("b"), USER, SAID], UNANSWERED + "a."),
        (
            [USER, calling("a"), {"role": "user", "content": [text("x"), *answering("a")["content"]]}],
            UNANSWERED,
        ),
        (
            [USER, SAID, answering("a")],
            "messages.2.content.0: unexpected `tool_use_id` found in `tool_result`",
        ),
        ([USER, calling("a"), answering("a", "a")], "messages.2.content.1: each tool_use must have a single"),
        (
            [USER, calling("a"), answering("a"), calling("a"), answering("a")],
            "messages: `tool_use` ids must be",
        ),
        ([USER, calling("a b")], "messages.1.content.0.tool_use.id: String should match pattern"),
        ([{"role": "user", "content": [THOUGHT]}], "messages.0.content.0: `thinking` blocks can only be in"),
    ],
)
def test_an_invalid_conversation_is_refused_in_anthropic_s_words(
    messages: list[object], beginning: str
) -> None:
    assert (judged(*messages) or "").startswith(beginning)


def test_an_altered_thought_is_refused() -> None:
    spoken = {"role": "assistant", "content": [{**THOUGHT, "thinking": "so!"}, text("hi")]}
    assert judged(USER, spoken, USER) == "messages.1.content.0: Invalid `signature` in `thinking` block"
    hidden = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": seal_thought("so")[:-4]}],
    }
    assert judged(USER, hidden, USER) == "messages.1.content.0: Invalid `data` in `redacted_thinking` block"
    marked = {"role": "assistant", "content": [{**THOUGHT, **MARK}, text("hi")]}
    assert judged(USER, marked, USER) == (
        "messages.1.content.0.thinking.cache_control: Extra inputs are not permitted"
    )


def test_an_unfinished_run_of_calls_begins_with_its_thought_where_thinking_is_on() -> None:
    later = [calling("b"), answering("b")]
    bare = [USER, calling("a"), answering("a"), *later]
    whole = [USER, calling("a", first=(THOUGHT,)), answering("a"), *later]
    assert judged(*bare) is None
    assert judged(*bare, USER, SAID, USER, thinking=THINKING) is None
    assert judged(*whole, thinking=THINKING) is None
    assert (judged(*bare, thinking=THINKING) or "").startswith(
        "messages.1.content.0.type: Expected `thinking`"
    )


ADAPTIVE = {"type": "adaptive"}
LENIENT = {**ADAPTIVE, "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
BOUND = (
    ": Invalid `signature` in `thinking` block. The block is bound to a different conversation. Remove the "
    'block, or set `thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
)


def behind(*messages: object, **more: object) -> dict[str, Any]:
    """A thought that a newer model has behind these."""
    signed = sign_thought("so", compute_prefix_digest({"messages": list(messages), **more}))
    return {**THOUGHT, "signature": signed}


def test_a_newer_model_takes_a_thought_back_behind_what_it_was_produced_behind() -> None:
    first = calling("a", first=(behind(USER, tools=[{"name": "f"}]),))
    second = calling("b", first=(behind(USER, first, answering("a"), tools=[{"name": "f"}]),))
    rest = [answering("a"), second, answering("b")]
    offered = {"tools": [{"name": "f", **MARK}], "thinking": ADAPTIVE}
    marked = {"role": "user", "content": [text("hello", **MARK)]}
    assert judged(USER, first, *rest, **offered) is None
    assert judged(marked, first, *rest, **offered) is None
    assert judged(USER, calling("a"), answering("a"), calling("b"), answering("b"), **offered) is None
    assert judged(USER, first, answering("a"), calling("b"), answering("b"), **offered) is None


def test_a_newer_model_refuses_a_thought_behind_anything_else() -> None:
    first = calling("a", first=(behind(USER),))
    second = calling("b", first=(behind(USER, first, answering("a")),))
    rest = [answering("a"), second, answering("b")]
    other = {"role": "user", "content": "a summary"}
    assert judged(USER, first, *rest, thinking=ADAPTIVE) is None
    assert judged(other, first, *rest) == f"messages.1.content.0{BOUND}"
    assert judged(USER, first, *rest, system="be kind") == f"messages.1.content.0{BOUND}"
    assert judged(USER, calling("a"), *rest, thinking=ADAPTIVE) == f"messages.3.content.0{BOUND}"
    assert judged(other, first, *rest, thinking=LENIENT) is None
    assert judged(other, first, *rest, thinking=THINKING) is None


def test_a_fifth_mark_for_the_cache_is_refused_wherever_it_is() -> None:
    inner = {"type": "tool_result", "tool_use_id": "a", "content": [text("x", **MARK)]}
    messages = [USER, calling("a"), {"role": "user", "content": [inner, text("so", **MARK)]}]
    system, tools = [text("be", **MARK)], [{"name": "f", "input_schema": {}, **MARK}]
    assert judged(*messages, system=system, tools=tools) is None
    assert judged(*messages, system=system, tools=tools, **MARK) == (
        "A maximum of 4 blocks with cache_control may be provided. Found 5."
    )


@pytest.mark.parametrize(
    ("missing", "message"), [("model", "model: Field required"), ("max_tokens", "max_tokens: Field required")]
)
def test_what_is_required_is_required(missing: str, message: str) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]}
    del body[missing]
    wrong = validate_request(body)
    assert wrong is not None
    assert wrong.message == message
    assert (validate_count_request(body) is None) == (missing == "max_tokens")


def test_an_overflow_has_the_wording_and_numbers_of_anthropic() -> None:
    assert check_overflow(100, 60, 40) is None
    found = [check_overflow(100, 101, 1), check_overflow(100, 60, 41)]
    assert [each and each.message for each in found] == [
        "prompt is too long: 101 tokens > 100 maximum",
        (
            "input length and `max_tokens` exceed context limit: 60 + 41 > 100, decrease input length or "
            "`max_tokens` and try again"
        ),
    ]
