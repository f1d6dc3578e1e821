"""Detects that an upstream read only a part of a request without reporting an error.

Ollama, for example, removes the beginning of a request that is too long, and responds with status 200. Only
the token count in the response's usage shows this. If the counts stay about the same while the requests grow,
the largest count is the context window. A single low count does not prove a truncation. For example, a text
of one repeated letter has far fewer tokens than estimated, and a response from a cache reports the count of
another request.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from compaction_proxy.providers.calibration import MIN_USAGE_TOKENS, Calibration

# A token count below this share of the proxy's calibrated estimate is low: the upstream may not have read the
# whole request.
LOW_COUNT_SHARE = 0.6
# If the proxy's estimate grows by more than this factor between two requests of a conversation, but the
# upstream's count stays exactly the same, `judge_answer` returns `low` or `doubtful`.
GROWTH_FACTOR = 1.1
# If the upstream's count has grown since the previous request by at least this share of the growth of the
# proxy's estimate, `judge_answer` returns `whole` even for a low count.
COUNT_GROWTH_SHARE = 0.5
# `infer_window` uses the requests whose low counts differ from the newest low count by at most the factor
# `COUNT_SPREAD`. It infers a context window only if these requests have at least `MIN_LOW_COUNTS` different
# sizes, and if the largest size is at least `SIZE_SPREAD` times the smallest.
MIN_LOW_COUNTS = 3
COUNT_SPREAD = 1.15
SIZE_SPREAD = 1.3
# If a request has fewer tokens than this by the proxy's calibrated estimate, `judge_answer` returns `whole`,
# because no model has so small a context window.
MIN_JUDGED_TOKENS = 2_000
TRUSTED_AFTER = 3  # number of observations after which the calibration is trusted

Verdict = Literal["whole", "doubtful", "low"]


class AnsweredRequest(NamedTuple):
    """The token counts of a request that got a response.

    Attributes:
        estimate: The proxy's uncalibrated count of the forwarded request, in tokens.
        prompt: `usage.prompt_tokens` of the response.
        completion: `usage.completion_tokens` of the response; 0 if unknown.
        cached: Number of cached prompt tokens. Some providers do not include them in `usage.prompt_tokens`.
        has_media: Whether the request contains images or other parts whose tokens the proxy may overestimate.
    """

    estimate: int
    prompt: int
    completion: int = 0
    cached: int = 0
    has_media: bool = False


def judge_answer(
    answer: AnsweredRequest, previous: AnsweredRequest | None, calibration: Calibration
) -> Verdict:
    """Decides from the token count in a response whether the upstream read the whole request.

    Returns `whole` if the count gives no reason to assume that the upstream truncated the request. If the
    result is `doubtful`, the caller must not learn from the request. If the result is `low`, the caller may
    learn only the context window that `infer_window` returns.

    Args:
        answer: Token counts of the request.
        previous: Previous request of the same conversation to the same model; None if unknown.
        calibration: Calibration of the model before this request.
    """
    size = calibration.predict_tokens(answer.estimate)
    if size < MIN_JUDGED_TOKENS or answer.prompt < MIN_USAGE_TOKENS:
        return "whole"
    if (
        previous is not None
        and previous.prompt == answer.prompt
        and answer.estimate > GROWTH_FACTOR * previous.estimate
    ):
        from_a_cache = answer.completion > 0 and answer.completion == previous.completion
        return "doubtful" if from_a_cache else "low"
    low = answer.prompt + answer.cached < LOW_COUNT_SHARE * size
    if not low or answer.has_media or (previous is not None and _has_count_grown(answer, previous)):
        return "whole"
    return "low" if calibration.observations >= TRUSTED_AFTER else "doubtful"


def infer_window(low_answers: Sequence[AnsweredRequest], largest_count_tokens: int) -> int | None:
    """Returns the context window to which the upstream truncates requests, in tokens; None if uncertain.

    Uses the requests in `low_answers` whose counts are about equal to that of the newest (`COUNT_SPREAD`).
    Returns None if these requests have fewer than `MIN_LOW_COUNTS` different estimates, or if the estimates
    differ too little (`SIZE_SPREAD`). Also returns None if the window would be at least the smallest
    estimate.

    Args:
        low_answers: Answered requests for which `judge_answer` returned `low`, the newest last.
        largest_count_tokens: The upstream's largest count of all requests to the model so far, in tokens. The
            returned window is at least this number.
    """
    if not low_answers:
        return None
    newest = low_answers[-1].prompt
    alike = [
        each for each in low_answers if max(each.prompt, newest) <= COUNT_SPREAD * min(each.prompt, newest)
    ]
    sizes = {each.estimate for each in alike}
    if len(sizes) < MIN_LOW_COUNTS or max(sizes) < SIZE_SPREAD * min(sizes):
        return None
    window = max(largest_count_tokens, *(each.prompt for each in alike))
    return window if window < min(sizes) else None


def _has_count_grown(now: AnsweredRequest, last: AnsweredRequest) -> bool:
    """Returns whether the estimate and the upstream's count have both grown since the request `last`.

    The count must have grown by at least `COUNT_GROWTH_SHARE` of the growth of the estimate.
    """
    added = now.estimate - last.estimate
    return added > 0 and now.prompt - last.prompt >= COUNT_GROWTH_SHARE * added
