"""Asks the table of prices in a process of its own: it takes 80 MB, and questions are few and not urgent."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from compaction_proxy.core.cost.price import ModelPrice, PriceTier

# How long the process may take, in seconds; on a machine that has nothing else to do it takes one.
LIMIT_S = 20.0
# Nothing but this process's own `sys.path` says what is imported there.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from compaction_proxy.providers.price_table import main; main()"
)


class PriceProcess:
    """Knows what models cost, by a process that ends once it has answered.

    It reads a line `["model", "origin", at]` for each name until there are no more, and so outlives a parent
    that dies by no more than its own work. It writes a line for each: null, or the fields of a `ModelPrice`.

    Args:
        command: What runs it.
        limit_s: How long it may take, in seconds.
    """

    def __init__(
        self, command: Sequence[str] = (sys.executable, "-I", "-c", _PROGRAM), limit_s: float = LIMIT_S
    ) -> None:
        self._command = command
        self._limit_s = limit_s

    def find_prices(self, names: Sequence[tuple[str, str]], at: float) -> list[ModelPrice | None]:
        """What models cost; see `compaction_proxy.providers.pricing.PriceTable`."""
        told = "".join(f"{json.dumps([*name, at])}\n" for name in names)
        answer = subprocess.run(  # noqa: S603 - nothing of what clients choose is in the command
            (*self._command, *sys.path),
            input=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            timeout=self._limit_s,
            check=True,
            start_new_session=True,  # who interrupts the server from a terminal lets this finish
        )
        found = [_parse_price(json.loads(line)) for line in answer.stdout.splitlines()]
        if len(found) != len(names):
            raise ValueError(f"{len(names)} names, {len(found)} answers")
        return found


def _parse_price(fields: dict[str, Any] | None) -> ModelPrice | None:
    match fields:
        case {"tiers": [*tiers], "source": str(source), "date": str(date)}:
            return ModelPrice(tuple(PriceTier(*tier) for tier in tiers), source, date)
        case _:
            return None
