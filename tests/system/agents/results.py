"""Results of sessions, in docs/agents.json; .ci/docs_pages.py makes a table of them in docs/clients.md."""

import fcntl
import json
from pathlib import Path
from typing import Any

from tests.system.agents.judge import Verdict

RESULTS = Path(__file__).parents[3] / "docs" / "agents.json"


def record_verdict(client: str, wire: str, version: str, cell: str, verdict: Verdict) -> None:
    """Put the result of one session into the file; what is known of others stays."""
    RESULTS.touch()
    with RESULTS.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # sessions may run beside each other
        entries: list[dict[str, Any]] = json.loads(file.read() or "[]")
        known = {(each["client"], each["wire"]): each for each in entries}
        entry = known.setdefault(
            (client, wire), {"client": client, "wire": wire, "version": version, "cells": {}}
        )
        if entry["version"] != version:
            entry.update(version=version, cells={})
        violations = {rule: len(found) for rule, found in verdict.violations.items()}
        entry["cells"][cell] = {"violations": violations, **verdict.figures}
        entry["cells"] = dict(sorted(entry["cells"].items()))
        file.seek(0)
        file.write(json.dumps([known[key] for key in sorted(known)], indent=1) + "\n")
        file.truncate()
