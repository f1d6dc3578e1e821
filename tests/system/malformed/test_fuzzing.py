"""Guided by what our readers do with it, input is changed until one of them does what it should not."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# No input may take longer, in seconds; no allocation may be larger, in MiB, for inputs of 4 KiB.
PATIENCE_S = 3
LARGEST_MIB = 16


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this platform"
)
def test_bytes_bred_to_reach_every_branch_find_none_that_fails(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    n = 25_000 if pytestconfig.getoption("--runslow") else 2_500
    options = [
        f"-runs={n}",
        "-seed=6",
        "-max_len=4096",
        f"-timeout={PATIENCE_S}",
        f"-malloc_limit_mb={LARGEST_MIB}",
        # libFuzzer reads the peak of the resident set, and a process inherits that from the one that starts
        # it, here from pytest. fuzz.py bounds the memory by a resource limit.
        "-rss_limit_mb=0",
    ]
    done = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("fuzz.py"),
            *options,
            f"-artifact_prefix={tmp_path}/",
            tmp_path,
        ],
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    assert f"Done {n} runs" in done.stderr, done.stderr[-1_000:]
