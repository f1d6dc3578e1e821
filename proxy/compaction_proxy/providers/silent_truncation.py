"""Noticing that an upstream read only a part of what it was sent, and said nothing.

Ollama, for one, cuts from the front and answers with status 200; what gives it away is its count. Counts that
stay the same while requests grow show a window. A single low count shows nothing: a text of one repeated
letter has far fewer tokens than estimated. An answer out of a cache carries the count of another request.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from compaction_proxy.providers.calibration import MIN_USAGE_TOKENS, Calibration

# Below this share of our estimate the upstream has not read everything.
READ_SHARE = 0.6
# Growth of an estimate, as a factor, that a count cannot sleep through.
GROWN = 1.1
# Share of what was added that a count must show to be believed.
FOLLOWED_SHARE = 0.5
# A window is inferred from so many low counts at least. They differ by the first factor at most, while the
# sizes of their requests differ by the second at least.
LEAST_LOW = 3
COUNT_SPREAD = 1.15
SIZE_SPREAD = 1.3
# No one runs a model with a window so small that a smaller request, in tokens, would be cut.
LEAST_SIZE_TOKENS = 2_000
TRUSTED_AFTER = 3  # observations

Verdict = Literal["whole", "doubtful", "low"]


class AnsweredRequest(NamedTuple):
    """One answered request, in tokens.

    Attributes:
        estimate: Our uncalibrated count of it as it was forwarded.
        prompt: `usage.prompt_tokens`.
        completion: `usage.completion_tokens`; 0 if unknown.
        cached: How many of the prompt's were cached; some gateways leave those out of `prompt`.
        guessed: Whether the estimate holds images and the like, which we may price too high.
    """

    estimate: int
    prompt: int
    completion: int = 0
    cached: int = 0
    guessed: bool = False


def judge_answer(now: AnsweredRequest, last: AnsweredRequest | None, calibration: Calibration) -> Verdict:
    """Whether the upstream read all of a request.

    Nothing should be learned from a doubtful answer, and from a low one only what `infer_window` says.

    Args:
        now: The request.
        last: The one before in the same conversation, to the same model; None if it is not known.
        calibration: Of the model, before this answer.
    """
    size = calibration.predict_tokens(now.estimate)
    if size < LEAST_SIZE_TOKENS or now.prompt < MIN_USAGE_TOKENS:
        return "whole"
    if last is not None and last.prompt == now.prompt and now.estimate > GROWN * last.estimate:
        from_a_cache = now.completion > 0 and now.completion == last.completion
        return "doubtful" if from_a_cache else "low"
    low = now.prompt + now.cached < READ_SHARE * size
    if not low or now.guessed or (last is not None and _has_followed_growth(now, last)):
        return "whole"
    return "low" if calibration.observations >= TRUSTED_AFTER else "doubtful"


def infer_window(low: Sequence[AnsweredRequest], most: int) -> int | None:
    """Returns the window, in tokens, at which the upstream seems to cut; None if the counts do not show one.

    Args:
        low: Answers whose counts are low, the newest last.
        most: The largest count of any answer so far, in tokens: the window is never smaller.
    """
    if not low:
        return None
    newest = low[-1].prompt
    alike = [each for each in low if max(each.prompt, newest) <= COUNT_SPREAD * min(each.prompt, newest)]
    sizes = {each.estimate for each in alike}
    if len(sizes) < LEAST_LOW or max(sizes) < SIZE_SPREAD * min(sizes):
        return None
    window = max(most, *(each.prompt for each in alike))
    return window if window < min(sizes) else None


def _has_followed_growth(now: AnsweredRequest, last: AnsweredRequest) -> bool:
    """Whether the count has grown with the estimate."""
    added = now.estimate - last.estimate
    return added > 0 and now.prompt - last.prompt >= FOLLOWED_SHARE * added
