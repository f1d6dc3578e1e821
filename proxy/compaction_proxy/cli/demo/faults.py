"""Trouble on demand: what the demo provider can do wrong, for demonstrations and tests."""

from collections.abc import Callable
from dataclasses import dataclass, replace

FAULT_HEADER = b"x-demo-fault"


@dataclass(frozen=True, slots=True)
class Fault:
    """How an answer goes wrong. The default is no trouble at all.

    Attributes:
        status: Answer with this error status; 0 for none.
        hang: Never answer.
        cut_after: End the connection after this many stream chunks (or half of a plain body); None for never.
        garbage: Answer 200 with bytes that are no chat completion.
        empty: Answer 200 with no body, or a stream of nothing but `[DONE]`.
        first_byte_s: Seconds before the first byte.
        chunk_s: Seconds before each further chunk.
        late: Tell of an overflow within a stream that began with 200: `error`, `failed` or `both`, which are
            different events on the Responses wire and one on the others; empty for an answer of status 400.
    """

    status: int = 0
    hang: bool = False
    cut_after: int | None = None
    garbage: bool = False
    empty: bool = False
    first_byte_s: float = 0.0
    chunk_s: float = 0.0
    late: str = ""


NO_FAULT = Fault()

LATE = ("error", "failed", "both")

_WORDS: dict[str, Callable[[Fault, str], Fault]] = {
    "status": lambda fault, value: replace(fault, status=int(value)),
    "hang": lambda fault, _: replace(fault, hang=True),
    "cut": lambda fault, value: replace(fault, cut_after=int(value or 3)),
    "garbage": lambda fault, _: replace(fault, garbage=True),
    "empty": lambda fault, _: replace(fault, empty=True),
    "slow": lambda fault, value: replace(fault, first_byte_s=float(value)),
    "delay": lambda fault, value: replace(fault, chunk_s=float(value)),
    "late": lambda fault, value: replace(fault, late=LATE[LATE.index(value or "error")]),
}


def _apply_word(fault: Fault, word: str) -> Fault:
    name, _, value = word.strip().partition("=")
    if name not in _WORDS:
        raise ValueError(f"no such fault: {name}")
    return _WORDS[name](fault, value)


def parse_fault(text: str, base: Fault = NO_FAULT) -> Fault:
    """Read words such as `slow=0.5, cut=3` on top of `base`.

    Words: `status=N`, `hang`, `cut[=chunks]`, `garbage`, `empty`, `slow=seconds`, `delay=seconds`,
    `late[=error|failed|both]`.

    Raises:
        ValueError: A word is unknown or its number is none.
    """
    fault = base
    for word in filter(str.strip, text.split(",")):
        fault = _apply_word(fault, word)
    return fault
