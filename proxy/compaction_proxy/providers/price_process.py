"""Looks up prices in a separate process, because the price table takes 80 MB of memory.

Each lookup starts a process, which is slow. That is acceptable, because lookups are few and not urgent.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from compaction_proxy.core.cost.price import ModelPrice, PriceTier

# Time limit of the process, in seconds. On an idle machine, it takes one second.
TIMEOUT_S = 20.0
# The child process gets this process's `sys.path`, so that it imports modules only from there.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from compaction_proxy.providers.price_table import main; main()"
)


class PriceProcess:
    """Looks up prices through a child process that ends after its answer.

    For each name, the child reads a line `["model", "origin", at]` and writes a line of JSON: null, or the
    fields of a `ModelPrice`. It ends at the end of its input. The input also ends if the parent dies, so the
    child does not outlive its parent for long.

    Args:
        command: Command line of the process.
        timeout_s: Time limit of the process, in seconds.
    """

    def __init__(
        self, command: Sequence[str] = (sys.executable, "-I", "-c", _PROGRAM), timeout_s: float = TIMEOUT_S
    ) -> None:
        self._command = command
        self._limit_s = timeout_s

    def find_prices(self, names: Sequence[tuple[str, str]], at: float) -> list[ModelPrice | None]:
        """Returns the prices of models; see `compaction_proxy.providers.pricing.PriceTable.find_prices`."""
        questions = "".join(f"{json.dumps([*name, at])}\n" for name in names)
        answer = subprocess.run(  # noqa: S603 - nothing that clients choose is in the command
            (*self._command, *sys.path),
            input=questions,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            timeout=self._limit_s,
            check=True,
            start_new_session=True,  # Ctrl-C in the server's terminal does not reach the child process
        )
        prices = [_parse_price(json.loads(line)) for line in answer.stdout.splitlines()]
        if len(prices) != len(names):
            raise ValueError(f"{len(names)} names, {len(prices)} answers")
        return prices


def _parse_price(fields: dict[str, Any] | None) -> ModelPrice | None:
    match fields:
        case {"tiers": [*tiers], "source": str(source), "date": str(date)}:
            return ModelPrice(tuple(PriceTier(*tier) for tier in tiers), source, date)
        case _:
            return None
