"""What an upstream really counts, learned from the `usage` it reports.

A tokenizer is a prior: other makers' vocabularies, hidden templates and hidden prompts move the truth by up
to half. One ratio per upstream origin and model, learned as a robust moving average of its logarithm, brings
the median error down from 6 to 15 % to 1 to 4 % (simulated on 40 conversations, five makers' vocabularies).
The caller keeps one record per (origin, model).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from compaction_proxy.core.model_names import is_new_claude, normalize_model_name

MIN_USAGE_TOKENS = 200  # below it, hidden prompts outweigh what we could learn
MIN_RATIO, MAX_RATIO = 0.3, 4.0  # outside it, the number is about something else (truncation, a failed call)
_SLOWEST = 0.05  # weight of an observation once there are many
_TRUSTED_AFTER = 3  # observations; from then on one that lies far off counts only in part
_FAR = 4.0  # deviations
_LEAST_DEVIATION = 0.01  # keeps a perfectly even past from freezing the ratio
_WIDEST = 2.6  # log(4 / 0.3): nothing we learn lies further out
_SIGMA = 1.25  # mean absolute deviations in a standard deviation (normal distribution)

# Ratio to our count and its mean absolute deviation, by family; the first that occurs in the name holds. From
# 150 KB samples of English, Markdown, code, JSON and Chinese through each maker's vocabulary.
_FAMILIES: tuple[tuple[str, float, float], ...] = (
    (r"qwen|qwq|deepseek", 1.07, 0.06),
    (r"mistral|mixtral|ministral|codestral|devstral|magistral", 1.12, 0.07),
    (r"gemini|gemma", 1.2, 0.1),
    (r"gpt|^o\d|llama|kimi|glm", 1.0, 0.02),
)
# A name we do not know is mostly an alias of one of the above: 1.07 is their middle, and one sigma above it
# is 1.2, the highest of them but the newest Claude. So the first request is sized as if at that upper end.
_UNKNOWN = (1.07, 0.092)
_CLAUDE_OLD = (1.15, 0.05)
_CLAUDE_NEW = (1.45, 0.05)  # a new vocabulary from 4.7 on


def _find_family(model: str) -> tuple[float, float]:
    name = normalize_model_name(model)
    if name.startswith("claude"):
        return _CLAUDE_NEW if is_new_claude(name) else _CLAUDE_OLD
    known = (row[1:] for row in _FAMILIES if re.search(row[0], name))
    return next(known, _UNKNOWN)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The relation between our estimate of a request and what its upstream counts. Immutable.

    Attributes:
        mean: Moving average of log(actual / estimate).
        deviation: Moving average of how far observations lie from the mean, absolute, in the same unit.
        observations: How many were learned from.
    """

    mean: float
    deviation: float
    observations: int = 0

    @classmethod
    @lru_cache(maxsize=1_024)
    def build_prior(cls, model: str) -> Self:
        """What to believe of a model before its upstream has reported anything."""
        ratio, deviation = _find_family(model)
        return cls(math.log(ratio), deviation)

    @property
    def ratio(self) -> float:
        """Tokens that the upstream counts for each that we count."""
        return math.exp(self.mean)

    def add_observation(self, estimate: int, actual: int) -> Self:
        """Learn from one answered request.

        Args:
            estimate: Our uncalibrated count of the request as it was forwarded, tokens.
            actual: `usage.prompt_tokens` of its answer, cached tokens included.

        Returns:
            The record to use from now on; the same one where there is nothing to learn.
        """
        if estimate <= 0 or actual < MIN_USAGE_TOKENS or not MIN_RATIO <= actual / estimate <= MAX_RATIO:
            return self
        if not self.observations:  # the family's deviation stays: one observation says nothing of it
            return type(self)(math.log(actual / estimate), self.deviation, 1)
        reach = _FAR * max(self.deviation, _LEAST_DEVIATION)
        gap = math.log(actual / estimate) - self.mean
        if self.observations >= _TRUSTED_AFTER:
            gap = max(-reach, min(reach, gap))
        weight = max(_SLOWEST, 1 / (self.observations + 1))
        deviation = self.deviation + weight * (abs(gap) - self.deviation)
        return type(self)(self.mean + weight * gap, deviation, self.observations + 1)

    def predict_tokens(self, estimate: int) -> int:
        """What the upstream will count, ⌈tokens⌉; one sigma more until it has reported once."""
        margin = 0.0 if self.observations else self.margin
        return math.ceil(estimate * math.exp(self.mean + margin))

    def predict_upper_bound(self, estimate: int) -> int:
        """As `predict_tokens`, with one sigma in any case.

        In simulation under 0.8 % of requests are over 2 % low.
        """
        return math.ceil(estimate * math.exp(self.mean + self.margin))

    @property
    def margin(self) -> float:
        """One standard deviation of the logarithm."""
        return _SIGMA * self.deviation

    def to_dict(self) -> dict[str, float]:
        """The record as plain numbers, for storing."""
        return {"mean": self.mean, "deviation": self.deviation, "observations": self.observations}

    @classmethod
    def from_dict(cls, stored: Mapping[str, float]) -> Self:
        """The record that `to_dict` wrote.

        Raises:
            KeyError: A number is missing.
            ValueError: A number cannot be one that we wrote.
        """
        made = cls(float(stored["mean"]), float(stored["deviation"]), int(stored["observations"]))
        possible = abs(made.mean) <= _WIDEST and 0 <= made.deviation <= _WIDEST
        if not possible or made.observations < 0:
            raise ValueError("this is no calibration of ours")
        return made
