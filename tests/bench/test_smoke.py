"""The bench runs from end to end; how fast anything is, is not judged."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TARGETS = ["direct", "proxy, gated", "proxy, gate off"]
pytestmark = pytest.mark.timeout(600)  # seconds; a quiet machine takes ten
LOADS = ("small c=1", "small c=32", "SSE c=32", "853 KB c=4")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench/throughput.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    file = tmp_path_factory.mktemp("bench") / "results.json"
    ended = run("--smoke", "--json", str(file))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, json.loads(file.read_text())


def test_every_target_answers_under_every_load(smoke: tuple[str, dict[str, Any]]) -> None:
    _, results = smoke
    measured = {(cell["target"], cell["load"]) for cell in results["cells"] if cell["answers"] > 0}
    assert measured == set(product(TARGETS, LOADS))
    assert results["targets"] == TARGETS


def test_nothing_is_left_out(smoke: tuple[str, dict[str, Any]]) -> None:
    _, results = smoke
    assert results["skipped"] == {}


def test_no_stream_loses_or_moves_a_byte(smoke: tuple[str, dict[str, Any]]) -> None:
    _, results = smoke
    assert {each["target"]: each["wrong"] for each in results["streams"]} == dict.fromkeys(TARGETS, 0)


def test_a_growing_conversation_is_measured_at_every_length(smoke: tuple[str, dict[str, Any]]) -> None:
    _, results = smoke
    lengths = results["plan"]["growth_tokens"]
    grown = {(each["target"], each["tokens"]) for each in results["growth"]}
    assert grown == set(product(("proxy, gated", "proxy, gate off"), lengths))


def test_a_decision_is_a_part_of_its_call(smoke: tuple[str, dict[str, Any]]) -> None:
    _, results = smoke
    assert all(0 < each["warm_s"] < each["warm_call_s"] for each in results["growth"])
    assert all(0 < each["cold_s"] < each["cold_call_s"] for each in results["growth"])
    assert all(each["cold_held_s"] > 0 and each["warm_held_s"] > 0 for each in results["growth"])


def test_memory_is_noted_after_every_step(smoke: tuple[str, dict[str, Any]]) -> None:
    _, results = smoke
    noted = [(each["target"], each["requests"]) for each in results["soak"] if each["rss_bytes"] > 0]
    assert noted == list(product(("proxy, gated", "proxy, gate off"), (10, 20)))


def test_every_goal_is_printed_with_what_was_measured(smoke: tuple[str, dict[str, Any]]) -> None:
    printed, _ = smoke
    assert "| goal |  | measured | met |" in printed
    assert "| proxy, gated: small c=1, p50, reference | ≤ 0.25 ms | " in printed
    assert "awecompress 0.2.0 |  | not measured |" in printed
