"""Whatever JSON comes, the provider reads it or refuses it."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.messages_wire import COUNT_TOKENS, MESSAGES
from tests.doubles.responses_wire import RESPONSES

KEYS = (
    "type", "role", "content", "text", "id", "call_id", "tool_use_id", "input", "output", "arguments", "name",
    "cache_control", "thinking", "signature", "encrypted_content",
)  # fmt: skip
KINDS = ("message", "text", "tool_use", "tool_result", "thinking", "reasoning", "function_call")

scalars = st.none() | st.booleans() | st.integers() | st.sampled_from(("", "x", "user", "assistant", *KINDS))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant"))},
    optional={"content": st.text(min_size=1) | values, "type": values},
)
bodies = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "max_tokens": st.integers(0, 9),
        "messages": values | st.lists(messages | values, max_size=3),
        "input": values | st.lists(messages | values, max_size=3),
        **dict.fromkeys(("tools", "system", "reasoning", "thinking", "instructions"), values),
    },
)


@settings(max_examples=50, deadline=None)
@given(bodies)
def test_any_body_is_judged_and_a_valid_one_is_read(body: dict[str, Any]) -> None:
    for form in (RESPONSES, MESSAGES, COUNT_TOKENS):
        wrong = form.validate(body)
        assert (wrong is None and form.read_request(body).prompt["model"] == "m") or (wrong and wrong.message)
