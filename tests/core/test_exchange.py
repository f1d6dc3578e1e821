"""Exchanges: what is stored of them and read again, and what counts as the first answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.exchange import Exchange, from_fields, to_fields

TIMES = st.floats(0, 1e12)
COUNTS = st.none() | st.integers(0, 10**9)
TEXTS = st.text(max_size=9)
EXCHANGES = st.builds(
    Exchange,
    at=TIMES,
    model=TEXTS,
    status=TEXTS,
    code=st.integers(0, 599),
    request=TEXTS,
    strategy=TEXTS,
    round=COUNTS,
    reason=TEXTS,
    request_bytes=st.integers(0, 10**9),
    tokens_before=COUNTS,
    window=COUNTS,
    prompt_tokens=COUNTS,
    overhead_s=TIMES,
    first_byte_s=st.none() | TIMES,
    upstream_s=st.none() | TIMES,
    recalls=COUNTS,
    recall_prompt_tokens=COUNTS,
)


@given(EXCHANGES, COUNTS)
def test_no_size_is_negative_however_absurd_the_usage(exchange: Exchange, after: int | None) -> None:
    # A counter of Prometheus takes no negative amount.
    assert min(exchange._replace(tokens_after=after).sizes or (0,)) >= 0


@given(EXCHANGES)
def test_a_stored_exchange_is_read_as_it_was(exchange: Exchange) -> None:
    assert from_fields(json.loads(json.dumps(to_fields(exchange)))) == exchange


def test_what_is_unknown_is_not_stored_and_a_zero_is() -> None:
    assert to_fields(Exchange(1.0, "", "none", cached_tokens=0)) == {
        "at": 1.0, "status": "none", "code": 0, "request_bytes": 0, "cached_tokens": 0, "overhead_s": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("at", [None, "1", True, float("nan"), float("inf"), 10**400])
def test_fields_without_a_time_are_no_exchange(at: object) -> None:
    assert from_fields({"at": at, "model": "m"}) is None


def test_invalid_and_unknown_fields_are_ignored() -> None:
    stored: dict[str, Any] = {
        "at": 7, "model": 1, "status": "none", "code": "200", "round": 1.5, "window": True, "upstream_s": "x",
        "overhead_s": 2, "tokens_after": 9, "saving": {}, "later": 1,
    }  # fmt: skip
    assert from_fields(stored) == Exchange(7.0, "", "none", tokens_after=9, overhead_s=2.0)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"prompt_tokens": 100}, 100),
        ({"prompt_tokens": None}, None),
        ({"prompt_tokens": 300, "recalls": 2, "recall_prompt_tokens": 180}, 120),
        ({"prompt_tokens": 300, "recalls": 2, "recall_prompt_tokens": None}, None),
        ({"prompt_tokens": None, "recalls": 2, "recall_prompt_tokens": 180}, None),
    ],
)
def test_tokens_of_answers_after_a_search_are_not_those_of_the_first_answer(
    figures: dict[str, Any], expected: int | None
) -> None:
    assert Exchange(1.0, "m", "none", **figures).first_prompt_tokens == expected


READ = {"code": 200, "tokens_before": 900, "tokens_after": 400}


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"code": 200, "prompt_tokens": 100}, (100, 100)),  # not read: it went on as it came
        ({**READ, "prompt_tokens": 410}, (910, 410)),
        (READ, (900, 400)),  # the provider has counted nothing
        ({**READ, "prompt_tokens": 0}, (900, 400)),
        ({**READ, "tokens_before": 380, "prompt_tokens": 410}, (390, 410)),  # excerpts were put into it
        ({**READ, "prompt_tokens": 900, "recalls": 1, "recall_prompt_tokens": 490}, (910, 900)),
        ({**READ, "prompt_tokens": 900, "recalls": 1}, (900, 900)),
        ({"code": 200}, None),
        ({**READ, "code": 0}, None),
        ({**READ, "code": 429}, (0, 0)),
        ({"code": 503}, (0, 0)),
    ],
)
def test_sizes_are_what_the_upstream_has_counted_and_what_was_removed(
    figures: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    assert Exchange(1.0, "m", "none", **figures).sizes == expected


@pytest.mark.parametrize(("code", "failed"), [(0, False), (399, False), (400, True), (503, True)])
def test_an_error_of_the_upstream_is_a_failure_and_no_answer_is_none(
    code: int,
    failed: bool,  # noqa: FBT001 - a case of the table
) -> None:
    assert Exchange(1.0, "m", "none", code).has_failed is failed
