"""What the composition root builds: only what the configuration names is loaded."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from proxy.app import create_app
from proxy.config.model import Config

create_app(Config.model_validate({}))
print(*({{"aiohttp", "redis", "cryptography"}} & sys.modules.keys()))
"""


def loaded(config: dict[str, dict[str, str]]) -> set[str]:
    """Which of three large libraries a process has loaded that has built the proxy from `config`."""
    run = [sys.executable, "-c", SCRIPT.format(config)]
    return set(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, set()),
        ({"upstream": {"engine": "aiohttp"}}, {"aiohttp"}),
    ],
)
def test_a_library_that_the_configuration_does_not_name_is_not_loaded(
    config: dict[str, dict[str, str]], expected: set[str]
) -> None:
    assert loaded(config) == expected


def test_the_library_of_a_shared_store_is_loaded_with_it() -> None:
    assert "redis" in loaded({"store": {"url": "redis://127.0.0.1:1"}})
