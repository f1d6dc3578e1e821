"""What the suite says of each client, for the compatibility table in the docs."""

from typing import Any

from tests.system.clients.comparing import compacted, untouched, was_compacted
from tests.system.clients.playing import Case, Client
from tests.system.clients.stage import Way

Runs = dict[Way, dict[str, Case]]


def _verdicts(runs: Runs, name: str) -> dict[str, str]:
    direct, proxied, narrow = (runs[way].get(name) for way in Way)
    if direct is None:
        return {"direct": "failed"}
    fits = narrow is not None and not compacted(direct, narrow)
    kind = "compacted" if narrow is not None and was_compacted(narrow) else "ok"
    return {
        "direct": "ok",
        "proxy": "ok" if proxied is not None and not untouched(direct, proxied) else "failed",
        "compacted": kind if fits else "failed",
    }


def result(client: Client, runs: Runs) -> dict[str, Any]:
    """One entry of the results.

    Each case (`WIRE/WHAT`) has a word for each way: `ok`, `failed`, or `compacted`, which is `ok` with at
    least one request of the case compacted.
    """
    return {
        "client": client.package,
        "version": client.version,
        "language": client.language,
        "wires": list(client.wires),
        "cases": {name: _verdicts(runs, name) for name in runs[Way.DIRECT]},
    }
