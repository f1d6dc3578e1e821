"""What is known of a request on its way, and its figures at the end."""

from dataclasses import replace

import pytest

from compaction_proxy.compaction.types import Fit, Report, Status
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.gateway.body_budget import BodyBudget
from compaction_proxy.gateway.control_headers import Control
from compaction_proxy.gateway.identity import Who
from compaction_proxy.gateway.request_state import Passage, request_id
from compaction_proxy.wires.wire import Usage


def passage() -> Passage:
    scope = {"type": "http", "headers": []}
    return Passage(Who("t", "c_1"), b"{}", scope, Control(), 2, "r_1", BodyBudget().open(), model="m", at=7.0)


@pytest.mark.parametrize("given", [b"abc-1", b"!" * 128])
def test_a_client_s_request_id_is_taken(given: bytes) -> None:
    assert request_id(given) == given.decode()


@pytest.mark.parametrize("given", [None, b"", b"a b", b"a\x00", b"x" * 129, "é".encode()])
def test_what_is_no_request_id_gets_a_new_one(given: bytes | None) -> None:
    first, second = request_id(given), request_id(given)
    assert first != second
    assert first.startswith("r_")


def test_a_request_that_was_not_read_has_its_size_and_times_only() -> None:
    ours = passage()
    ours.code = 200
    ours.waited(0.5)
    ours.settled()
    told = ours.exchange(None)
    timed = (told.overhead_s, told.upstream_s)
    plain = Exchange(7.0, "m", "none", 200, "r_1", request_bytes=2, overhead_s=timed[0], first_byte_s=0.5)
    assert told == plain._replace(upstream_s=timed[1])


def test_a_request_that_was_read_tells_what_became_of_it_and_what_was_counted() -> None:
    ours = passage()
    report = Report(
        Status.REUSED, "c_2", "anchored", 3, messages_before=9, messages_after=4,
        tokens_before=900, tokens_after=400, window=1_000, trigger=800, reason="soft",
    )  # fmt: skip
    ours.fit = Fit(b"{}", 400, report)
    told = ours.exchange(Usage(410, 20, 256))
    assert told == Exchange(
        7.0, "m", "reused", 0, "r_1", "anchored", 3, "soft", 2, 9, 4, 900, 400, 1_000, 800, 410, 20, 256,
    )  # fmt: skip
    assert ours.conversation == "c_2"


def test_overhead_is_what_the_upstream_was_not_waited_for() -> None:
    ours = passage()
    ours.started -= 2.0  # it came two seconds ago, and the upstream took one and a half of them
    ours.waited(1.0)
    ours.waited(0.5)
    ours.settled()
    assert ours.overhead_s == pytest.approx(0.5, abs=0.2)
    told = ours.exchange(None)
    assert told.first_byte_s == 0.5
    assert told.upstream_s == pytest.approx(0.5, abs=0.2)


def test_a_body_is_let_go_of_unless_something_is_learned_from_it() -> None:
    ours = passage()
    ours.fit = replace(ours.whole(), estimate=5)
    ours.release()
    assert (ours.raw, ours.fit.raw, ours.fit.estimate) == (b"", b"", 5)
