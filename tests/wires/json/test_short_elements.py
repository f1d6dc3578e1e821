"""Arrays and objects of very many very short values, which would take forty times their bytes."""

import json
from functools import partial

import pytest

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.incremental_reader import IncrementalReader
from compaction_proxy.wires.json.slices import (
    MAX_MEMBERS,
    MAX_UNCHECKED_ARRAY_BYTES,
    find_members,
    split_elements,
)

SAID = b'{"role":"user","content":"hello"}'


@pytest.mark.parametrize("short", [b"1", b"{}", b"[]", b'""'])
def test_very_many_short_elements_are_refused_before_they_are_copied(short: bytes) -> None:
    assert len(split_elements(b"[%b]" % b",".join([short] * 100))) == 100
    with pytest.raises(UnreadableBodyError, match="too-many"):
        split_elements(b"[%b]" % b",".join([short] * MAX_UNCHECKED_ARRAY_BYTES))


def test_numbers_behind_a_message_are_refused_also_where_its_beginning_is_known() -> None:
    body = b'{"model":"m","messages":[%b]}'
    reader = IncrementalReader(bytes(32), CHAT)
    reader.read(body % SAID, "t")
    for read_by in (partial(parse_body, wire=CHAT), partial(reader.read, tenant="t")):
        with pytest.raises(UnreadableBodyError):
            read_by(body % (SAID + b",1" * MAX_UNCHECKED_ARRAY_BYTES))


@pytest.mark.parametrize("noise", ["1,2,", "\ud800,,,,,,,", '\\",,,,,,,,,'])
def test_commas_in_a_text_are_no_elements(noise: str) -> None:
    said = json.dumps({"role": "user", "content": noise * MAX_UNCHECKED_ARRAY_BYTES}).encode()
    assert split_elements(b"[%b,%b]" % (said, SAID)) == (said, SAID)


def test_so_many_members_are_read_and_one_more_is_not() -> None:
    written = [b'"%d":1' % number for number in range(MAX_MEMBERS + 1)]
    assert len(find_members(b"{%b}" % b",".join(written[1:]))) == MAX_MEMBERS
    with pytest.raises(UnreadableBodyError, match="too-many"):
        find_members(b"{%b}" % b",".join(written))
