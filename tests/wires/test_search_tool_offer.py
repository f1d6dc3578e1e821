"""A tool of ours among those of a request, and a request that goes on: bytes are put in, none is changed."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.chat import search_tool as chat_tools
from compaction_proxy.wires.messages import search_tool as messages_tool
from compaction_proxy.wires.search_tool import add_tool, is_prefill

NAME = "memory_search"
CHAT_TOOL = chat_tools.SEARCH_TOOL
TOOL = b'{"type":"function","function":{"name":"memory_search"}}'
OPEN = b'{"function": {"name": "open"} }'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_each_wire_defines_the_same_tool_in_its_own_shape() -> None:
    chat, messages = (
        json.loads(each)
        for each in (chat_tools.SEARCH_TOOL.definition_json, messages_tool.SEARCH_TOOL.definition_json)
    )
    told = chat["function"]
    assert (chat["type"], told["name"]) == ("function", NAME)
    assert messages == {
        "name": NAME, "description": told["description"], "input_schema": told["parameters"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "made"),
    [
        (b'{"messages":[1]}', b'{"messages":[1],"tools":[%b]}'),
        (b' {"messages":[1] } \n', b' {"messages":[1] ,"tools":[%b]} \n'),
        (b'{"tools":null,"messages":[1]}', b'{"tools":[%b],"messages":[1]}'),
        (b'{"messages":[1],"tools": [ ] }', b'{"messages":[1],"tools": [%b] }'),
        (b'{"tools":[%b],"messages":[]}' % OPEN, b'{"tools":[%b,%%b],"messages":[]}' % OPEN),
        (b'{"tools":[ %b\n ]}' % OPEN, b'{"tools":[ %b,%%b\n ]}' % OPEN),
        (b'{"tools":[{}],"tool_choice":"none","n":1}', b'{"tools":[{},%b],"tool_choice":"none","n":1}'),
        (b'{"tool_choice":null,"n":null}', b'{"tool_choice":null,"n":null,"tools":[%b]}'),
    ],
)  # fmt: skip
def test_the_tool_comes_last_and_every_other_byte_stays(raw: bytes, made: bytes) -> None:
    found = CHAT_TOOL.inspect_tool_support(raw, NAME)
    assert (found.can_add_tool, add_tool(found, TOOL)) == (True, made % TOOL)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"tools":[{"function":{"name":"memory_search"}}]}',
        b'{"tools":{"a":1}}',
        b'{"tools":"all"}',
        b'{"functions":[{}]}',
        b'{"function_call":"auto"}',
        b'{"tool_choice":"required"}',
        b'{"tools":[],"tool_choice":"auto"}',
        b'{"audio":{}}',
        b'{"n":2}',
        b'{"n":1.0}',
        b'{"n":"1"}',
        b'{"response_format":{"type":"json_object"}}',
        b'{"response_format":{"type": "json_schema","json_schema":{}}}',
    ],
)
def test_where_a_tool_of_ours_has_no_place(raw: bytes) -> None:
    assert not CHAT_TOOL.inspect_tool_support(raw, NAME).can_add_tool


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"a":1,"a":2}', b'{"n":1}x', b"[" * 100_000])
def test_what_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(UnreadableBodyError):
        CHAT_TOOL.inspect_tool_support(raw, NAME)


@settings(max_examples=40, deadline=None)
@given(
    body=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    tools=st.none() | st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=2), max_size=3),
    indent=st.none() | st.integers(0, 2),
)
def test_a_body_means_the_same_but_for_the_tool(body: dict[str, Any], tools: Any, indent: int | None) -> None:
    given_body = {**body, "messages": [], "tools": tools}
    found = CHAT_TOOL.inspect_tool_support(json.dumps(given_body, indent=indent).encode(), NAME)
    assert json.loads(add_tool(found, TOOL)) == {**given_body, "tools": [*(tools or ()), json.loads(TOOL)]}


@settings(max_examples=40, deadline=None)
@given(messages=st.lists(VALUES, min_size=1, max_size=3), more=st.lists(VALUES, min_size=1, max_size=3))
def test_a_request_goes_on_behind_its_own_messages(messages: list[Any], more: list[Any]) -> None:
    raw = json.dumps({"messages": messages, "stream": True}).encode()
    made = CHAT_TOOL.continue_request(raw, more)
    assert json.loads(made) == {"messages": [*messages, *more], "stream": True}
    stop = raw.rindex(b"]", 0, raw.rindex(b'"stream"'))
    assert (made[:stop], made.endswith(raw[stop:])) == (raw[:stop], True)


def test_without_messages_nothing_goes_on() -> None:
    for raw in (b"{}", b'{"messages":7}'):
        with pytest.raises(UnreadableBodyError):
            CHAT_TOOL.continue_request(raw, [{}])


def test_every_call_can_be_forbidden() -> None:
    assert CHAT_TOOL.forbid_calls(b'{"tools":[]} ') == b'{"tools":[],"tool_choice":"none"} '
    assert CHAT_TOOL.forbid_calls(b'{"tool_choice": null,"n":1}') == b'{"tool_choice": "none","n":1}'


def test_an_answer_that_the_client_has_begun_is_known_by_its_role() -> None:
    messages: list[Any] = [{"role": "assistant", "content": "x"}, {"role": "user", "content": '"assistant"'}]
    messages += [{"role": "user", "name": "assistant"}, {"content": "assistant"}]
    begun = [is_prefill(json.dumps(message, indent=1).encode()) for message in messages]
    assert begun == [True, False, False, False]
