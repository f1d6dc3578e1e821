"""Where requests of each wire go, and with whose key."""

from typing import Any

import pytest
from pydantic import ValidationError

from compaction_proxy.config.sections import UpstreamSection

OPENAI, ANTHROPIC, LOCAL = (
    "https://api.openai.com/v1",
    "https://api.anthropic.com",
    "http://127.0.0.1:8080/v1",
)


@pytest.mark.parametrize(
    ("given", "responses", "messages"),
    [
        ({}, (OPENAI, ""), (ANTHROPIC, "")),
        ({"api_key": "o"}, (OPENAI, "o"), (OPENAI, "o")),
        ({"base_url": LOCAL}, (LOCAL, ""), (LOCAL, "")),
        ({"base_url": LOCAL, "api_key": "l"}, (LOCAL, "l"), (LOCAL, "l")),
        ({"wires": {"messages": {"base_url": ANTHROPIC}}, "api_key": "o"}, (OPENAI, "o"), (ANTHROPIC, "")),
        (
            {"wires": {"messages": {"base_url": ANTHROPIC, "api_key": "a"}}, "api_key": "o"},
            (OPENAI, "o"),
            (ANTHROPIC, "a"),
        ),
        ({"api_key": "o", "wires": {"messages": {"api_key": "a"}}}, (OPENAI, "o"), (ANTHROPIC, "a")),
        ({"base_url": "https://api.openai.com"}, ("https://api.openai.com", ""), (ANTHROPIC, "")),
        (
            {"base_url": "https://API.OpenAI.com:443/v1/"},
            ("https://API.OpenAI.com:443/v1", ""),
            (ANTHROPIC, ""),
        ),
        (
            {"base_url": "https://api.openai.com.evil/v1"},
            ("https://api.openai.com.evil/v1", ""),
            ("https://api.openai.com.evil/v1", ""),
        ),
        ({"base_url": LOCAL, "wires": {"responses": {"api_key": "r"}}}, (LOCAL, "r"), (LOCAL, "")),
    ],
)
def test_a_key_goes_to_the_origin_that_it_is_named_for(
    given: dict[str, Any], responses: tuple[str, str], messages: tuple[str, str]
) -> None:
    section = UpstreamSection.model_validate(given)
    assert section.get_provider("chat") == (
        given.get("base_url", OPENAI).rstrip("/"),
        given.get("api_key", ""),
    )
    assert (section.get_provider("responses"), section.get_provider("messages")) == (responses, messages)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("auto", "auto"), (True, "auto"), ("true", "auto"), (False, False), ("false", False)],
)
def test_lower_max_tokens_is_auto_or_false(given: object, expected: object) -> None:
    section = UpstreamSection.model_validate({"lower_max_tokens": given})
    assert section.lower_max_tokens == expected


@pytest.mark.parametrize("given", ["maybe", 3, 0, None, {"a": 1}])
def test_anything_else_for_lower_max_tokens_is_one_clear_error(given: object) -> None:
    with pytest.raises(ValidationError) as caught:
        UpstreamSection.model_validate({"lower_max_tokens": given})
    [error] = caught.value.errors()
    assert error["msg"] == "Value error, must be auto or false"
