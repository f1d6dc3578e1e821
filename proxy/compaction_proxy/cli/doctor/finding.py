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


def format_findings(found: Iterable[Finding]) -> list[str]:
    """A line for each finding, not cut: what mends it stands at its end."""
    from compaction_proxy.cli.output import Column, format_table

    rows = [(each.level, each.topic, _format_finding(each)) for each in found]
    columns = (Column("result"), Column("topic"), Column("finding"))
    return format_table(columns, rows, None)


def _format_finding(each: Finding) -> str:
    return f"{each.what}; fix: {each.fix}" if each.fix else each.what
