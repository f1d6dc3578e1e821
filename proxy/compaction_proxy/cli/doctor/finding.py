"""Findings: one line each, and what mends it."""

from collections.abc import Iterable
from typing import NamedTuple

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"


class Finding(NamedTuple):
    """What was found.

    Attributes:
        level: One of the words above; an error keeps the proxy from working.
        topic: What was looked at.
        what: How it is.
        fix: What to do about it; empty where nothing is to be done.
    """

    level: str
    topic: str
    what: str
    fix: str = ""


def lines(found: Iterable[Finding]) -> list[str]:
    """A line for each finding, not cut: what mends it stands at its end."""
    from compaction_proxy.cli.output import Column, table

    rows = [(each.level, each.topic, _told(each)) for each in found]
    columns = (Column("result"), Column("topic"), Column("finding"))
    return table(columns, rows, None)


def _told(each: Finding) -> str:
    return f"{each.what}; fix: {each.fix}" if each.fix else each.what
