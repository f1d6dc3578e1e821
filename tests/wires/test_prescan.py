"""What is found in a body without parsing it."""

import pytest
from hypothesis import given

from compaction_proxy.wires.body import (
    parse_body,
)
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.prescan import MentionedNumbers, find_models, find_output_limits, may_have_media
from tests.wires.test_body import UNHURRIED, VALID


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"model":"gpt-4o"}', {"gpt-4o"}),
        (b'{\n"model"\t: \n"gpt-4o"}', {"gpt-4o"}),
        (b'{"x":"C:\\\\","model":"gpt-4o"}', {"gpt-4o"}),
        (b'{"model":"openai\\/gpt-4o"}', {"openai/gpt-4o"}),
        (b'{"model":"a\\"b"}', {'a"b'}),
        (b'{"model":"\\ud83d\\ude00"}', {"😀"}),
        (b'{"model":"a","x":{"model":"b"}}', {"a", "b"}),
        (b'{"messages":[{"content":"\\"model\\":\\"b\\""}],"model":"a"}', {"a"}),
        (b'{"messages":[{"content":"{\\"model\\": \\"b\\"}\\\\"}],"model":"a"}', {"a"}),
        (b'{"x":"model","y":["model"]}', set()),
        (b'{"model":null}', set()),
        (b'{"model":"a', set()),
        (b'{"model":"\\q"}', {"\\q"}),
        (b"", set()),
    ],
)
def test_models_are_found_without_parsing(raw: bytes, expected: set[str]) -> None:
    assert find_models(raw) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"max_tokens":64,"max_completion_tokens" : 32}', [64, 32]),
        (b'{"max_tokens":1234567890123}', [1234567890123]),
        (b'{"max_tokens":%b}' % (b"9" * 5_000), [10**18 - 1]),
        (b'{"x":"\\"max_tokens\\":64"}', []),
        (b'{"max_tokens":null,"max_output_tokens":3}', [3]),
        (b"", []),
    ],
)
def test_limits_of_the_output_are_found_without_parsing(raw: bytes, expected: list[int]) -> None:
    assert find_output_limits(raw) == expected


@UNHURRIED
@given(VALID)
def test_the_model_and_the_output_asked_for_are_never_missed(raw: bytes) -> None:
    cut = parse_body(raw, CHAT)

    assert cut.model in find_models(raw)
    assert cut.max_output in find_output_limits(raw)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"type":"image_url"}', True),
        (b'{"type":"input_audio"}', True),
        (b'{"type":"file"}', True),
        (b'{"type":"video_url"}', True),
        (b'{"content":"an image_url, a file"}', False),
    ],
)
def test_media_are_noticed_without_parsing(raw: bytes, expected: bool) -> None:  # noqa: FBT001 - a column
    assert may_have_media(raw) is expected


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (7, "[7]"),
        (100, '"\\u0031\\u0030\\u0030"'),
        (12_800, '"12,800 and more"'),
        (12_800, '"\\n12800"'),
        (3_000, '"3 000"'),
        (3_000, '"3\\u00A0000"'),
        (3_000, '"3\u00a0000"'),
        (1_234_567, '"1.234.567"'),
    ],
)
def test_numbers_that_a_request_mentions_are_found_however_they_are_written(
    number: int, written: str
) -> None:
    assert number in MentionedNumbers(f'{{"a":[1],"b":{written}}}'.encode())


@pytest.mark.parametrize(
    "written", ['"128001"', '"412800"', '"12 8000"', '"12,80"', '"12\\u005800"', '"1\\\\u00312800"']
)
def test_numbers_that_only_look_alike_are_not_mentioned(written: str) -> None:
    assert 12_800 not in MentionedNumbers(f'{{"a":[1],"b":{written}}}'.encode())
