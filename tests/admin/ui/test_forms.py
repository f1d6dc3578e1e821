"""Forms as browsers send them, whatever was typed and however much."""

from urllib.parse import urlencode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request

from compaction_proxy.admin.ui.pages import read_form
from compaction_proxy.core.errors import RequestRefusedError

TEXT = st.text(st.characters(codec="utf-8"))
KIND = (b"content-type", b"application/x-www-form-urlencoded")


async def filled(body: bytes) -> dict[str, list[str]]:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [KIND]}
    return await read_form(Request(scope, receive), limit_bytes=1_000_000)


@given(st.lists(st.tuples(st.text(st.characters(codec="ascii"), min_size=1), TEXT), max_size=20))
@example([("a", "x" * 65_535 + "<ü&=+% " * 9), ("a", "x" * 65_534 + "ü"), ("a", "ü" * 65_536)])
async def test_what_was_filled_in_is_what_is_read(fields: list[tuple[str, str]]) -> None:
    found: dict[str, list[str]] = {}
    for name, value in fields:
        found.setdefault(name, []).append(value)
    assert await filled(urlencode(fields).encode()) == found


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b"", {}),
        (b"&&a&=b&", {"a": [""], "": ["b"]}),
        (b"a=%&b=%4&c=%zz", {"a": ["%"], "b": ["%4"], "c": ["%zz"]}),
        (b"a=%ff\xfe", {"a": ["\N{REPLACEMENT CHARACTER}" * 2]}),
    ],
)
async def test_what_no_browser_sends_is_read_as_far_as_it_goes(
    body: bytes, fields: dict[str, list[str]]
) -> None:
    assert await filled(body) == fields


async def test_many_fields_are_refused() -> None:
    with pytest.raises(RequestRefusedError) as refused:
        await filled(b"a=1&" * 101)
    assert refused.value.status == 400
