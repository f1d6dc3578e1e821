"""Failures of upstreams are told apart by cause, added up, and read back from what was stored."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.upstream_failure import (
    UpstreamFailure,
    UpstreamFailures,
    add_failures,
    failures_to_fields,
    format_status_cause,
    is_failure_status,
    is_server_error,
    parse_failures,
)

FAILURES = st.lists(
    st.builds(
        UpstreamFailure,
        st.sampled_from(["http://a:1", "http://b:2"]),
        st.sampled_from(["answer-cut", "http-503"]),
        st.integers(0, 2**40),
        st.floats(0, 2e9),
    )
)


@pytest.mark.parametrize("status", [401, 402, 403, 407, 408, 429, 500, 503, 529])
def test_a_status_about_the_provider_or_the_account_is_a_failure(status: int) -> None:
    assert is_failure_status(status)
    assert format_status_cause(status) == f"http-{status}"


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
def test_a_status_about_one_request_is_no_failure(status: int) -> None:
    assert not is_failure_status(status)
    assert not is_server_error(status)


@given(FAILURES)
def test_counts_of_one_target_and_cause_are_summed_and_the_latest_time_stays(
    failures: list[UpstreamFailure],
) -> None:
    totals: UpstreamFailures = {}
    add_failures(totals, failures)

    assert sum(each.count for each in totals.values()) == sum(each.count for each in failures)
    for key, total in totals.items():
        same = [each for each in failures if (each.target, each.cause) == key]
        assert (total.count, total.last_at) == (
            sum(each.count for each in same),
            max(each.last_at for each in same),
        )


@given(FAILURES)
def test_what_was_written_is_read_again(failures: list[UpstreamFailure]) -> None:
    assert parse_failures(failures_to_fields(failures)) == failures


@pytest.mark.parametrize("rows", [None, {}, "x", [1, None, []]])
def test_what_is_no_list_of_failures_is_empty(rows: object) -> None:
    assert parse_failures(rows) == []


@pytest.mark.parametrize(
    ("key", "value"), [("target", 1), ("cause", None), ("count", "many"), ("last_at", None), ("count", 1.5)]
)
def test_an_incomplete_failure_is_left_out(key: str, value: Any) -> None:
    whole = {"target": "http://a:1", "cause": "answer-cut", "count": 2, "last_at": 7.0}
    assert parse_failures([whole | {key: value}, whole]) == [
        UpstreamFailure("http://a:1", "answer-cut", 2, 7.0)
    ]
