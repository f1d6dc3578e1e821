"""Prices from a process of their own: it answers in order, sees nothing of ours, and never stays."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.providers.price_process import PriceProcess

OPENAI = "https://api.openai.com:443"
AT = 1_795_000_000.0  # 2026-11-18
NAMES = [("gpt-5.4", OPENAI), ("my own\nmödel", OPENAI), ("gpt-4o", "http://127.0.0.1:4000")]


def told_by(program: str, limit_s: float = 10.0) -> list[ModelPrice | None]:
    return PriceProcess((sys.executable, "-I", "-c", program), limit_s).find_prices(NAMES, AT)


def test_every_name_has_its_answer_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies about where the server was started."""
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first, second, third = PriceProcess().find_prices(NAMES, AT)

    assert first is not None
    assert third is not None
    assert (first.surcharge_tokens, second) == (272_000, None)
    assert first.source == third.source == f"genai-prices {version('genai-prices')}"


def test_the_server_does_not_import_the_table() -> None:
    listing = "import sys, compaction_proxy.app, compaction_proxy.cli.main; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", listing], stdout=subprocess.PIPE, check=True, text=True)

    assert {"compaction_proxy.providers.pricing", "genai_prices"} & set(told.stdout.split()) == {
        "compaction_proxy.providers.pricing"
    }


def test_fields_become_a_price_again() -> None:
    told = '{"tiers": [[0, 1.5, 0.1, 2.0, 8.0], [9, 3, 0.2, 4, 16]], "source": "s 1", "date": "2026-01-02"}'
    found = ModelPrice(
        (PriceTier(0, 1.5, 0.1, 2.0, 8.0), PriceTier(9, 3.0, 0.2, 4.0, 16.0)), "s 1", "2026-01-02"
    )

    assert told_by(f"print({told!r}); print('null'); print('null')") == [found, None, None]


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "print('null')", "print('{')"])
def test_no_answer_and_half_an_answer_are_errors(program: str) -> None:
    with pytest.raises((subprocess.CalledProcessError, ValueError)):
        told_by(program)


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        told_by(program, limit_s=1.0)

    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_it_holds_no_file_and_no_socket_of_ours_open() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)  # noqa: FBT003 - its signature
    try:
        found = "any(os.path.exists(f'/proc/self/fd/{each}') for each in range(3, 256))"
        # What lists the folder would be seen itself.
        assert told_by(f"import os; assert not {found}; print('null\\n' * 3, end='')") == [None, None, None]
    finally:
        os.close(reading)
        os.close(writing)
