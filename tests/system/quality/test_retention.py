"""What matters survives five rounds, whatever the summary model does: `bench/retention.py`, judged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
RULES = {"safety_rule", "hard_constraint"}
SUMMARISING = ("full", "selective", "split", "iterations", "chained")
# Each test runs the bench, which takes minutes of processor time. The limit only catches a hang.
pytestmark = pytest.mark.timeout(900)


def measured(tmp_path: Path, strategies: str, seeds: int, modes: str) -> list[dict[str, Any]]:
    rows = tmp_path / "rows.json"
    asked = ["--strategies", strategies, "--seeds", str(seeds), "--modes", modes, "--json", str(rows)]
    subprocess.run([sys.executable, str(ROOT / "bench/retention.py"), *asked], check=True, timeout=900)
    found: list[dict[str, Any]] = json.loads(rows.read_text())
    return found


def judge(row: dict[str, Any]) -> None:
    told = f"{row['mode']}, {row['corpus']}"
    for kind, shares in row["survival"].items():
        assert min(shares) >= (1.0 if kind in RULES else 0.95), f"{told}: {kind} {shares}"
    assert max(row["stale"]) <= 0.05, f"{told}: {row['stale']}"
    assert max(row["share"]) <= 1.0, f"{told}: {row['share']}"
    assert max(row["share"][1:]) <= 0.5, f"{told}: {row['share']}"
    assert row["failed"] == 0, told


@pytest.mark.parametrize("seeds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_rules_and_facts_survive_five_rounds_with_any_summary_model(tmp_path: Path, seeds: int) -> None:
    rows = measured(tmp_path, "anchored", seeds, "extractive,lossy,empty,failing,hanging,injected")
    assert len(rows) == 12
    for row in rows:
        judge(row)


@pytest.mark.slow
def test_every_strategy_that_summarises_ends_at_half_of_what_came_in(tmp_path: Path) -> None:
    for row in measured(tmp_path, ",".join(SUMMARISING), 3, "lossy,extractive"):
        assert row["share"][-1] <= 0.5, (row["strategy"], row["share"])
        assert row["failed"] == 0
