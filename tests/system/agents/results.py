"""Results of sessions, in docs/agents.json; .ci/docs_pages.py makes a table of them in docs/clients.md."""

import json
from pathlib import Path
from typing import Any

from tests.system.agents.judge import Verdict

RESULTS = Path(__file__).parents[3] / "docs" / "agents.json"


def record_verdict(client: str, wire: str, version: str, cell: str, verdict: Verdict) -> None:
    """Put the result of one session into the file; what is known of others stays."""
    entries: list[dict[str, Any]] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    known = {(each["client"], each["wire"]): each for each in entries}
    entry = known.setdefault(
        (client, wire), {"client": client, "wire": wire, "version": version, "cells": {}}
    )
    if entry["version"] != version:
        entry.update(version=version, cells={})
    violations = {rule: len(found) for rule, found in verdict.violations.items()}
    entry["cells"][cell] = {"violations": violations, **verdict.figures}
    entry["cells"] = dict(sorted(entry["cells"].items()))
    text = json.dumps([known[key] for key in sorted(known)], indent=1)
    RESULTS.write_text(f"{text}\n", "utf-8")
