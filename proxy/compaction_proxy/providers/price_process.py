"""Looks up prices in a process of its own: the table takes 80 MB, and lookups are few and not urgent."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from compaction_proxy.core.cost.price import ModelPrice, PriceTier

# Time limit of the process, in seconds. On an idle machine it takes one second.
LIMIT_S = 20.0
# The child process imports from this process's own `sys.path` only.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from compaction_proxy.providers.price_table import main; main()"
)


class PriceProcess:
    """Looks up prices through a process that ends after its answer.

    The process reads one line `["model", "origin", at]` per name until the end of its input. If its parent
    dies, it therefore only finishes the work at hand. It writes one line per name: null, or the fields of a
    `ModelPrice`.

    Args:
        command: Command line of the process.
        limit_s: Time limit of the process, in seconds.
    """

    def __init__(
        self, command: Sequence[str] = (sys.executable, "-I", "-c", _PROGRAM), limit_s: float = LIMIT_S
    ) -> None:
        self._command = command
        self._limit_s = limit_s

    def find_prices(self, names: Sequence[tuple[str, str]], at: float) -> list[ModelPrice | None]:
        """Returns the prices of models; see `compaction_proxy.providers.pricing.PriceTable`."""
        questions = "".join(f"{json.dumps([*name, at])}\n" for name in names)
        answer = subprocess.run(  # noqa: S603 - nothing that clients choose is in the command
            (*self._command, *sys.path),
            input=questions,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            timeout=self._limit_s,
            check=True,
            start_new_session=True,  # an interrupt of the server from a terminal lets the process finish
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
