"""Noticing that an upstream read only a part of what it was sent, and said nothing.

Ollama, for one, cuts from the front and answers with status 200; what gives it away is its count. A count
that does not grow with the conversation is a window; one that is merely low may have other reasons, and then
it follows the next messages. An answer out of a cache carries the count of another request.
"""

from typing import Literal, NamedTuple

from proxy.core.calibration import MIN_USAGE_TOKENS, Calibration

# Below this share of our estimate the upstream has not read everything.
READ_SHARE = 0.6
# Growth of an estimate, as a factor, that a count cannot sleep through.
GROWN = 1.1
# Share of what was added that a count must show to be believed.
FOLLOWED_SHARE = 0.5
# An upstream that has read more than this many times a count has not cut at that count.
MOST_BEYOND = 2
# No one runs a model with a window so small that a smaller request, in tokens, would be cut.
LEAST_SIZE_TOKENS = 2_000
TRUSTED_AFTER = 3  # observations

Verdict = Literal["whole", "doubtful", "truncated"]


class Answered(NamedTuple):
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


def judged(now: Answered, last: Answered | None, calibration: Calibration, most: int = 0) -> Verdict:
    """Whether the upstream read all of a request. From a doubtful answer nothing should be learned.

    Args:
        now: The request.
        last: The one before in the same conversation, to the same model; None if it is not known.
        calibration: Of the model, before this answer.
        most: The largest count of any request to it so far, in tokens; 0 if none is known.
    """
    size = calibration.size(now.estimate)
    if size < LEAST_SIZE_TOKENS or now.prompt < MIN_USAGE_TOKENS:
        return "whole"
    if last is not None and last.prompt == now.prompt and now.estimate > GROWN * last.estimate:
        from_a_cache = now.completion > 0 and now.completion == last.completion
        return "doubtful" if from_a_cache else "truncated"
    low = now.prompt + now.cached < READ_SHARE * size
    if not low or now.guessed or (last is not None and _follows(now, last)):
        return "whole"
    known = calibration.observations >= TRUSTED_AFTER and most <= MOST_BEYOND * now.prompt
    return "truncated" if known else "doubtful"


def _follows(now: Answered, last: Answered) -> bool:
    """Whether the count has grown with the estimate."""
    added = now.estimate - last.estimate
    return added > 0 and now.prompt - last.prompt >= FOLLOWED_SHARE * added
