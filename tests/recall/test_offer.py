"""When the search tool is offered, and which models take tools by their names."""

from typing import NamedTuple

import pytest

from compaction_proxy.recall.offer import RecallToolMode, should_offer_tool, supports_tools


class Recalling(NamedTuple):
    tool: RecallToolMode


class Settings(NamedTuple):
    recall: Recalling
    tools: bool | None = None


def settings(tool: RecallToolMode, *, tools: bool | None = None) -> Settings:
    return Settings(Recalling(tool), tools)


@pytest.mark.parametrize(("tool", "before", "after"), [
    ("none", False, False), ("inject", False, True), ("always", True, True),
])  # fmt: skip
def test_the_tool_is_offered_once_something_was_removed_or_always_as_configured(
    tool: RecallToolMode, *, before: bool, after: bool
) -> None:
    found = [
        should_offer_tool(settings(tool), is_compacted=compacted, has_tools=True, model="any")
        for compacted in (False, True)
    ]
    assert found == [before, after]


@pytest.mark.parametrize(
    ("tools", "has_tools", "model", "expected"),
    [
        (None, False, "gpt-5.4-mini", True),
        (None, False, "my-local-model", False),
        (None, True, "my-local-model", True),
        (True, False, "my-local-model", True),
        (False, True, "gpt-5.4-mini", False),
    ],
)
def test_a_model_takes_tools_as_configured_else_where_the_request_has_some_else_by_its_name(
    *, tools: bool | None, has_tools: bool, model: str, expected: bool
) -> None:
    asked = settings("inject", tools=tools)
    assert should_offer_tool(asked, is_compacted=True, has_tools=has_tools, model=model) is expected


@pytest.mark.parametrize("model", [
    "gpt-4o", "openai/gpt-5.4", "ft:gpt-4o-mini:acme::1", "us.anthropic.claude-opus-4-5-v1:0", "o3-mini",
    "models/gemini-3.1-pro-preview", "x-ai/grok-4", "mistral-large-latest", "deepseek-chat", "qwen-plus",
])  # fmt: skip
def test_models_that_take_tools_are_known_by_their_names(model: str) -> None:
    assert supports_tools(model)


@pytest.mark.parametrize("model", [
    "", "gpt-5-chat-latest", "gpt-3.5-turbo-instruct", "o1-mini-2024-09-12", "gpt-4-vision-preview",
    "meta-llama/Llama-3.1-8B-Instruct", "qwen2.5:7b", "mistral-7b-instruct", "gpt-oss-120b", "nobody-knows",
])  # fmt: skip
def test_open_weights_unknown_names_and_models_without_tools_are_not_taken_for_such(model: str) -> None:
    assert not supports_tools(model)
