"""The last count that a provider reported of a conversation: the best there is to size its next request by.

What came since is small beside what was counted, so an error of the tokenizer touches only that. Simulated on
40 conversations in five makers' vocabularies the p95 error is 0.7 to 1.9 %; with the margin of `bound`, no
request was more than 2 % larger than it said. Digests are those of `core.digest.prefix_digests`.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from compaction_proxy.providers.calibration import MAX_RATIO, MIN_RATIO, MIN_USAGE_TOKENS, Calibration

# What was added since, or taken away, may be wrong by this factor.
MARGIN = 1.15
_PLACE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Anchor:
    """What a provider counted of one request.

    Attributes:
        prefix: Prefix digest of the client's non-privileged messages.
        length: How many those were.
        place: What stood for them upstream (`place_of`).
        estimate: Our uncalibrated count of what was forwarded, tokens.
        actual: `usage.prompt_tokens` of the answer, cached tokens included.
    """

    prefix: bytes
    length: int
    place: bytes
    estimate: int
    actual: int


@lru_cache(maxsize=4_096)
def place_of(origin: str, model: str, checkpoint: bytes = b"") -> bytes:
    """What makes two requests of a conversation comparable, 16 bytes.

    Who counts, and the place of the checkpoint in force (`core.checkpoint.place`; empty for none).
    """
    parts = (origin, model, checkpoint.hex())
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).digest()[:_PLACE_BYTES]


def anchored(prefixes: Sequence[bytes], place: bytes, estimate: int, actual: int) -> Anchor | None:
    """An anchor for a request that was answered; None if its count says nothing about a next one."""
    if not prefixes or estimate <= 0 or actual < MIN_USAGE_TOKENS:
        return None
    if not MIN_RATIO <= actual / estimate <= MAX_RATIO:
        return None
    return Anchor(prefixes[-1], len(prefixes), place, estimate, actual)


def stands(anchor: Anchor, prefixes: Sequence[bytes], place: bytes) -> bool:
    """Whether a request with these prefix digests continues what was counted, seen by the same counter."""
    reached = 0 < anchor.length <= len(prefixes)
    return reached and anchor.place == place and prefixes[anchor.length - 1] == anchor.prefix


def deepest(anchors: Sequence[Anchor], prefixes: Sequence[bytes], place: bytes) -> Anchor | None:
    """The anchor that stands and covers most; of equal ones the last given."""
    found: Anchor | None = None
    for anchor in reversed(anchors):
        if (found is None or anchor.length > found.length) and stands(anchor, prefixes, place):
            found = anchor
    return found


def predicted(anchor: Anchor, estimate: int, calibration: Calibration) -> int:
    """What the provider will count of a request, ⌈tokens⌉.

    The difference is taken at the geometric mean of this conversation's ratio and the model's.

    Args:
        anchor: One that stands.
        estimate: Our uncalibrated count of the request as it would be forwarded, tokens.
        calibration: Of the model.
    """
    return _reckoned(anchor, estimate, calibration, 1.0)


def bound(anchor: Anchor, estimate: int, calibration: Calibration) -> int:
    """As `predicted`, with the margin: more for what was added, less off for what was taken away."""
    return _reckoned(anchor, estimate, calibration, MARGIN)


def _reckoned(anchor: Anchor, estimate: int, calibration: Calibration, margin: float) -> int:
    rate = math.sqrt(anchor.actual / anchor.estimate * calibration.ratio)
    difference = (estimate - anchor.estimate) * rate
    difference *= margin if difference > 0 else 1 / margin
    return max(0, math.ceil(anchor.actual + difference))


def to_fields(anchor: Anchor) -> list[Any]:
    """The anchor as JSON values."""
    return [anchor.prefix.hex(), anchor.length, anchor.place.hex(), anchor.estimate, anchor.actual]


def from_fields(fields: Mapping[str, Any] | None) -> tuple[Anchor, ...]:
    """The anchors under `anchors` in a record, without what is none of ours."""
    listed = fields.get("anchors") if fields else None
    made = map(_read, listed) if isinstance(listed, list) else ()
    return tuple(anchor for anchor in made if anchor is not None)


def _read(fields: Any) -> Anchor | None:  # noqa: ANN401 - whatever was stored
    try:
        prefix, length, place, estimate, actual = fields
        read = Anchor(bytes.fromhex(prefix), int(length), bytes.fromhex(place), int(estimate), int(actual))
    except (TypeError, ValueError):
        return None
    return read if min(read.length, read.estimate, read.actual) > 0 else None
