"""Defines `Finding`, a result of a check, and formats findings as a table."""

from collections.abc import Iterable
from typing import NamedTuple

from compaction_proxy.cli.output import Column, format_table

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"


class Finding(NamedTuple):
    """A result of a check.

    Attributes:
        level: `ok`, `note`, `warning` or `error`. An error keeps the proxy from working.
        topic: What was checked, such as `store`.
        what: The result in words.
        fix: What to do about the result. Empty if nothing needs to be done.
    """

    level: str
    topic: str
    what: str
    fix: str = ""


def format_findings(findings: Iterable[Finding]) -> list[str]:
    """Formats a table with a line for each finding.

    Lines are not cut to the width of the terminal, because the fix is at the end of the line.
    """
    rows = [(each.level, each.topic, _format_finding(each)) for each in findings]
    columns = (Column("result"), Column("topic"), Column("finding"))
    return format_table(columns, rows, None)


def _format_finding(finding: Finding) -> str:
    return f"{finding.what}; fix: {finding.fix}" if finding.fix else finding.what
