"""Times as people ask for them: `90m`, `24h`, `7d` ago, or seconds since the epoch."""

import re
from typing import Annotated

from fastapi import Query

_UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}
PATTERN = r"^(?:[0-9]{1,6}[mhd]|[0-9]{1,11}(?:\.[0-9]{1,6})?)$"
_AGO = re.compile(r"([0-9]+)([mhd])")

Time = Annotated[str, Query(pattern=PATTERN)]


def moment(told: str, now: float) -> float:
    """The time that a text of `PATTERN` names, in seconds since the epoch."""
    ago = _AGO.fullmatch(told)
    return float(told) if ago is None else now - int(ago[1]) * _UNITS_S[ago[2]]
