"""Defines the faults that the demo provider produces on demand, for demonstrations and tests."""

from collections.abc import Callable
from dataclasses import dataclass, replace

FAULT_HEADER = b"x-demo-fault"


@dataclass(frozen=True, slots=True)
class Fault:
    """Describes how an answer goes wrong. The default is an answer without a fault.

    Attributes:
        status: Error status to answer with. 0 for none.
        hang: Whether the provider never answers.
        cut_after: Number of stream chunks after which the connection is closed. If the answer is not
            streamed, the connection is closed after half of the body instead. None does not close it early.
        garbage: Whether the answer has status 200 and bytes that are no chat completion.
        empty: Whether the answer has status 200 and no content: no body, or a stream without events or with
            only the event `[DONE]`.
        first_byte_s: Seconds before the first byte of the answer.
        chunk_s: Seconds before each further chunk of a stream.
    """

    status: int = 0
    hang: bool = False
    cut_after: int | None = None
    garbage: bool = False
    empty: bool = False
    first_byte_s: float = 0.0
    chunk_s: float = 0.0


NO_FAULT = Fault()

_WORDS: dict[str, Callable[[Fault, str], Fault]] = {
    "status": lambda fault, value: replace(fault, status=int(value)),
    "hang": lambda fault, _: replace(fault, hang=True),
    "cut": lambda fault, value: replace(fault, cut_after=int(value or 3)),
    "garbage": lambda fault, _: replace(fault, garbage=True),
    "empty": lambda fault, _: replace(fault, empty=True),
    "slow": lambda fault, value: replace(fault, first_byte_s=float(value)),
    "delay": lambda fault, value: replace(fault, chunk_s=float(value)),
}


def _apply_word(fault: Fault, word: str) -> Fault:
    name, _, value = word.strip().partition("=")
    if name not in _WORDS:
        raise ValueError(f"no such fault: {name}")
    return _WORDS[name](fault, value)


def parse_fault(text: str, base: Fault = NO_FAULT) -> Fault:
    """Parses a text such as `slow=0.5, cut=3` and returns `base` with these faults added.

    The possible words are `status=N`, `hang`, `cut[=chunks]`, `garbage`, `empty`, `slow=seconds` and
    `delay=seconds`.

    Raises:
        ValueError: A word is unknown or its value is invalid.
    """
    fault = base
    for word in filter(str.strip, text.split(",")):
        fault = _apply_word(fault, word)
    return fault
