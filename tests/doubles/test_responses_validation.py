from typing import Any

import pytest

from tests.doubles.responses_validation import validate_request
from tests.doubles.thought_signature import seal_thought

USER = {"role": "user", "content": "hello"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}


def call(own: str, kind: str = "function_call", **more: object) -> dict[str, Any]:
    keys = {"function_call": "arguments", "custom_tool_call": "input"}
    return {"type": kind, "call_id": own, "name": "f", keys.get(kind, "action"): "{}", **more}


def output(own: str, kind: str = "function_call", **more: object) -> dict[str, Any]:
    return {"type": f"{kind}_output", "call_id": own, "output": "done", **more}


def reasoning(own: str = "rs_1", **more: object) -> dict[str, Any]:
    return {"type": "reasoning", "id": own, "summary": [], **more}


def judged(*items: object) -> tuple[str, str | None, str | None] | None:
    wrong = validate_request({"model": "m", "input": list(items)})
    return (wrong.message, wrong.param, wrong.code) if wrong else None


@pytest.mark.parametrize(
    "items",
    [
        [USER],
        [USER, call("a"), call("b"), output("b"), output("a")],
        [USER, call("a"), output("a"), call("a"), output("a")],
        [USER, call("a", "custom_tool_call"), output("a", "custom_tool_call")],
        [
            USER,
            call("a", "local_shell_call", id="l"),
            {"type": "local_shell_call_output", "id": "a", "output": ""},
        ],
        [USER, reasoning(encrypted_content=seal_thought("so")), call("a"), output("a"), SAID, USER],
        [{"type": "compaction", "encrypted_content": "x"}, USER],
        [USER, reasoning("rs_r0a"), call("a", id="fc_r0a_1"), output("a", id="fc_r0a_1")],
    ],
)
def test_valid_input_is_not_refused(items: list[object]) -> None:
    assert judged(*items) is None


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([USER, output("a")], "No tool call found for function call output with call_id a."),
        (
            [USER, call("a"), output("a", "custom_tool_call")],
            "No tool call found for custom tool call output with call_id a.",
        ),
        ([USER, output("a"), call("a")], "No tool call found for function call output with call_id a."),
        ([USER, call("a"), USER], "No tool output found for function call a."),
        (
            [USER, reasoning(), USER],
            "Item 'rs_1' of type 'reasoning' was provided without its required following item.",
        ),
        (
            [USER, SAID, reasoning()],
            "Item 'rs_1' of type 'reasoning' was provided without its required following item.",
        ),
        (
            [USER, call("a", id="fc_r0a_1"), output("a")],
            (
                "Item 'fc_r0a_1' of type 'function_call' was provided without its required 'reasoning' item: "
                "'rs_r0a'."
            ),
        ),
        (
            [reasoning(), SAID, reasoning(), SAID],
            "Duplicate item found with id rs_1. Remove duplicate items from your input and try again.",
        ),
    ],
)
def test_what_belongs_together_is_not_parted(items: list[object], message: str) -> None:
    assert judged(*items) == (message, "input", None)


def test_altered_reasoning_is_refused() -> None:
    found = judged(USER, reasoning(encrypted_content=seal_thought("so") + "A"), SAID)
    assert found is not None
    assert found[2] == "invalid_encrypted_content"


@pytest.mark.parametrize(
    ("item", "refused"),
    [
        ("x", ("input[0]", "invalid_type")),
        ({"type": "robot"}, ("input[0]", "invalid_value")),
        ({"role": "tool", "content": "x"}, ("input[0].role", "invalid_value")),
        ({"role": "user"}, ("input[0].content", "missing_required_parameter")),
        ({"role": "user", "content": [{"type": "output_text"}]}, ("input[0].content[0]", "invalid_value")),
        (
            {"role": "assistant", "content": [{"type": "input_text"}]},
            ("input[0].content[0]", "invalid_value"),
        ),
        ({"type": "function_call", "call_id": "a"}, ("input[0].arguments", "missing_required_parameter")),
    ],
)
def test_a_wrong_item_is_refused_where_it_is(item: object, refused: tuple[str, str]) -> None:
    found = judged(item)
    assert found is not None
    assert found[1:] == refused


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": "x"}, "missing_required_parameter"),
        ({"model": "m"}, "missing_required_parameter"),
        ({"model": "m", "input": []}, "empty_array"),
        ({"model": "m", "input": {}}, "invalid_type"),
        ({"model": "m", "previous_response_id": "resp_1", "input": "x"}, "previous_response_not_found"),
    ],
)
def test_a_request_that_is_not_whole_is_refused(body: dict[str, Any], code: str) -> None:
    wrong = validate_request(body)
    assert wrong is not None
    assert wrong.code == code
