"""`models`: from the shipped tables and the configuration, and with what a running proxy has seen."""

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from compaction_proxy.providers.windows import WINDOWS
from tests.helpers.scripted_admin import Scripted

Run = Callable[..., Result]
NOBODY = {"COMPACTION_PROXY__SERVER__PORT": "1"}
SEEN = {
    "model": "seen-1", "window": 1000, "window_source": "learned", "input_usd": 1.5, "cached_usd": 0.15,
    "output_usd": 6.0, "surcharge_tokens": 200_000, "price_source": "table", "price_date": "2026-11-01",
}  # fmt: skip


def test_a_model_by_name_needs_no_running_proxy(run: Run, tmp_path: Path) -> None:
    prices = "{input: 1, cached: 0.5, output: 2}"
    (tmp_path / "config.yaml").write_text(f"models: {{mine-1: {{window: 4096, prices: {prices}}}}}\n")
    rows = json.loads(run("models", "gpt-4.1", "--json", **NOBODY).stdout)["models"]
    assert [(row["model"], row["window"], row["window_source"]) for row in rows] == [
        ("gpt-4.1", WINDOWS["gpt-4.1"], "table")
    ]
    assert rows[0]["input_usd"] > rows[0]["cached_usd"] > 0
    mine = json.loads(run("models", "--json", **NOBODY).stdout)["models"]
    assert [(row["model"], row["window"], row["window_source"]) for row in mine] == [
        ("mine-1", 4096, "configured")
    ]
    assert (mine[0]["input_usd"], mine[0]["output_usd"], mine[0]["price_date"]) == (1.0, 2.0, None)


def test_of_a_running_proxy_come_the_models_it_has_seen(script: Scripted, run: Run) -> None:
    script.put("GET", "/models", {"models": [SEEN]})
    lines = run("models", "--url", script.url).stdout.splitlines()
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "seen-1 1,000 learned $1.50 $0.1500 $6.00 200,000 table 2026-11-01"
    ]
    both = json.loads(run("models", "gpt-4.1", "--url", script.url, "--json").stdout)["models"]
    assert [row["model"] for row in both] == ["gpt-4.1"]


def test_a_price_that_is_not_known_has_a_reason(script: Scripted, run: Run, tmp_path: Path) -> None:
    unknown = {"model": "mine", "window": 1000, "price_source": None}
    script.put("GET", "/models", {"models": [unknown], "list_prices": False})
    reason = "n/a: list prices do not apply to an upstream on this machine or network;"
    assert run("models", "--url", script.url).stdout.splitlines()[-1].startswith(reason)
    (tmp_path / "config.yaml").write_text("upstream: {base_url: 'http://127.0.0.1:9/v1'}\n")
    assert run("models", "gpt-4.1", **NOBODY).stdout.splitlines()[-1].startswith(reason)


def test_without_anything_to_show_it_is_the_whole_table(run: Run) -> None:
    rows = json.loads(run("models", "--json", **NOBODY).stdout)["models"]
    assert [row["model"] for row in rows] == list(WINDOWS)
    assert {row["window_source"] for row in rows} == {"table"}
