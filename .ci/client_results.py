"""Runs real clients directly and through the proxy, and writes into docs/clients.json what came of it.

    python .ci/client_results.py [NAME …]

Without names all clients are run; with names only those, and what is known of the others stays. Their
environments are made if need be, which takes the package registries. Ends with 1 if anything failed.
"""

# ruff: noqa: INP001 - a script, not a package

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.system.clients.cli.cli_clients import CLI  # noqa: E402 - the path comes first
from tests.system.clients.clients import PYTHON  # noqa: E402
from tests.system.clients.node.node_clients import NODE  # noqa: E402
from tests.system.clients.playing import play  # noqa: E402
from tests.system.clients.results import result  # noqa: E402
from tests.system.clients.stage import Way  # noqa: E402

RESULTS = ROOT / "docs" / "clients.json"
Entry = dict[str, Any]


def _known() -> dict[tuple[str, str], Entry]:
    """The results so far, by language and client."""
    if not RESULTS.exists():
        return {}
    found: list[Entry] = json.loads(RESULTS.read_text("utf-8"))
    return {(entry["language"], entry["client"]): entry for entry in found}


def main(names: list[str]) -> int:
    """Run the clients named, all if none is."""
    clients = (*PYTHON, *NODE, *CLI)
    unknown = set(names) - {client.name for client in clients}
    if unknown:
        sys.stderr.write(f"no such client: {', '.join(sorted(unknown))}\n")
        return 2
    entries = _known()
    failed = False
    for client in clients:
        if names and client.name not in names:
            continue
        entry = result(client, {way: play(client, way) for way in Way})
        entries[client.language, client.package] = entry
        wrong = [case for case, words in entry["cases"].items() if "failed" in words.values()]
        failed |= bool(wrong)
        sys.stderr.write(
            f"{client.name}: {len(entry['cases'])} cases, failed: {', '.join(wrong) or 'none'}\n"
        )
        text = json.dumps([entries[key] for key in sorted(entries)], indent=1, ensure_ascii=False)
        RESULTS.write_text(f"{text}\n", "utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
