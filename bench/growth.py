"""What a turn costs while a conversation grows: our CPU at several lengths, warm and cold, by `decision`.

Warm is a turn of a conversation whose earlier messages the proxy has seen; cold is its first sight of it all.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from load import LoadError
from processes import pinned

_SCRIPT = Path(__file__).with_name("decision.py")
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Grown:
    """A conversation of one length.

    Attributes:
        round: Counted from 0.
        target: Of which target this is the application.
        tokens: Length of the conversation, about.
        request_bytes: Body of the first request.
        cold_s: CPU time from the whole body to the request handed on, at first sight, in seconds.
        cold_call_s: The same of the whole call: with reading the body, and what follows the answer.
        warm_s: As `cold_s`, for each later turn.
        warm_call_s: As `cold_call_s`, for each later turn.
        cold_held_s: Longest stretch of it that held the loop, in seconds of CPU.
        warm_held_s: Longest of all later turns.
    """

    round: int
    target: str
    tokens: int
    request_bytes: int
    cold_s: float
    cold_call_s: float
    warm_s: float
    warm_call_s: float
    cold_held_s: float
    warm_held_s: float


def _said(mode: str, tokens: Sequence[int], turns: int, settings: Mapping[str, str]) -> str:
    command = [sys.executable, str(_SCRIPT), mode, str(turns), *map(str, tokens)]
    inherited = {key: held for key, held in os.environ.items() if not key.startswith("COMPACTION_PROXY")}
    try:
        ended = subprocess.run(
            command,
            env={**inherited, **settings},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        raise LoadError(f"a growing conversation did not end within {PATIENCE_S:.0f} s") from None
    if ended.returncode:
        raise LoadError(f"a growing conversation failed: {ended.stderr.strip()[-300:]}")
    return ended.stdout


def measured(
    number: int,
    target: str,
    *,
    mode: str,
    tokens: Sequence[int],
    turns: int,
    core: int | None,
    settings: Mapping[str, str],
    fast: bool,
) -> Iterator[Grown]:
    """New conversations of each length, and then so many turns of them, in a process of their own.

    Args:
        number: Of the round.
        target: How the results call it.
        mode: `gated` or `open`, as `decision` knows them.
        tokens: The lengths.
        turns: How many follow.
        core: Where to run it.
        settings: Environment variables beside those of this process.
        fast: Whether the tokenizer of the extra `fast` must be in use; otherwise it must not.

    Raises:
        LoadError: It failed, or counted with another tokenizer.
    """
    with pinned(core):
        said = _said(mode, tokens, turns, settings)
    for line in said.splitlines():
        found = json.loads(line)
        if "tokens" in found:
            if found.pop("fast") != fast:
                raise LoadError("counted with another tokenizer")
            yield Grown(number, target, **found)
