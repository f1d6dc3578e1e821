"""Whatever a client or a provider writes, no wire falls over it, and nothing of it is lost."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import SummaryError, UnreadableBodyError
from compaction_proxy.wires.body import parse_body, rewrite_messages
from compaction_proxy.wires.registry import WIRES
from compaction_proxy.wires.wire import Wire

KINDS = (
    *("text", "tool_use", "tool_result", "thinking", "image", "document", "server_tool_use"),
    *("message", "reasoning", "function_call", "function_call_output", "shell_call", "shell_call_output"),
    *(
        "input_text",
        "output_text",
        "input_image",
        "input_file",
        "input_audio",
        "web_search_call",
        "unheard_of",
    ),
)
TEXTS = ("", " ", "said", "said " * 90, "\ud800", "data:image/png;base64,AAAA", '{"a":[1]}', '{"a":')
ROLES = ("user", "assistant", "system")
NAMES = (
    *("text", "content", "output", "input", "arguments", "id", "call_id", "tool_use_id", "source", "data"),
    *("url", "image_url", "file_data", "summary", "thinking", "signature", "encrypted_content", "is_error"),
    *("action", "outcome", "refusal", "cache_control", "name", "detail"),
)
TYPES = st.sampled_from(KINDS)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(TEXTS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(
            lambda kind, held: {"type": kind, **held},
            TYPES | inner,
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
        )
    ),
    max_leaves=12,
)
ELEMENTS = st.builds(
    lambda role, content, more: {**more, "role": role, "content": content},
    st.sampled_from(ROLES),
    st.lists(ODD, max_size=4) | ODD,
    st.dictionaries(st.sampled_from(("type", *NAMES)), ODD | TYPES, max_size=4),
)
BRIEFLY = settings(
    deadline=None, max_examples=100 if settings.get_current_profile_name() != "full" else 3_000
)

every_wire = pytest.mark.parametrize("dialect", WIRES.values(), ids=WIRES)


def written(value: object) -> bytes:
    """JSON with lone surrogates as escapes."""
    return json.dumps(value).encode()


@every_wire
@BRIEFLY
@given(listed=st.lists(ELEMENTS, min_size=1, max_size=4), telling=ODD)
def test_odd_messages_are_read_and_written_or_are_unreadable(
    dialect: Wire, listed: list[Any], telling: object
) -> None:
    members = dialect.member_names
    with suppress(UnreadableBodyError):
        parse_body(
            written({members.messages: listed, **dict.fromkeys(members.skip_indicators, telling)}), dialect
        )
    with suppress(UnreadableBodyError):
        parse_body(
            written(
                {members.messages: listed, **{name: {"edits": telling} for name in members.skip_indicators}}
            ),
            dialect,
        )
    with suppress(UnreadableBodyError):
        body = parse_body(written({members.messages: listed}), dialect)
        records = [dialect.parse_uncounted(each, "gpt-4o").record for each in body.messages]
        assert [dialect.parse_message(each).text for each in body.messages] == [each.text for each in records]
        assert json.loads(rewrite_messages(body, records))
        for each in records:
            shorter = dialect.shorten_message(each, 0.2, "m_0")
            assert len(shorter.raw) <= len(each.raw)
            assert dialect.parse_message(shorter.raw).answered_call_ids == each.answered_call_ids
            assert json.loads(dialect.attach_parts(each, each).raw)


@every_wire
@BRIEFLY
@given(told=ODD, more=ODD)
def test_odd_answers_say_nothing_or_something(dialect: Wire, told: object, more: object) -> None:
    for answer in (told, dict.fromkeys(("content", "output", "choices", "usage", "status"), told)):
        with suppress(SummaryError):
            dialect.summary_call_format.parse_answer(written(answer))
        tap = dialect.open_tap("application/json", "")
        tap.feed(written(answer))
        tap.result()
    event = dict.fromkeys(("message", "response", "usage", "delta"), told) | {"type": more}
    stream = b"data: " + written(event) + b"\n\n"
    tap = dialect.open_tap("text/event-stream", "")
    tap.feed(stream)
    tap.result()
    dialect.may_hold_back_stream(stream)


def test_a_text_that_stays_is_not_written_as_a_list() -> None:
    dialect = WIRES["responses"]
    body = parse_body(b'{"model": "m", "input": "How long?"}', dialect)
    assert rewrite_messages(body, [dialect.parse_message(each) for each in body.messages]) == body.raw
