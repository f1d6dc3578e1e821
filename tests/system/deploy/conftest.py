"""Reads deployment files, and finds out whether their settings are ones that the proxy knows."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import load_config
from tests.helpers.openai_node import play

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = Path(__file__).with_name("schemas")  # with a package of npm for each group
STORE_URL = "COMPACTION_PROXY__STORE__URL"

Documents = Callable[[str], list[dict[str, Any]]]
Configured = Callable[[Mapping[str, str]], Config]


@pytest.fixture(scope="session")
def documents() -> Documents:
    """The documents of a YAML file, named from the root of the repository."""

    def read(name: str) -> list[dict[str, Any]]:
        return list(yaml.safe_load_all((ROOT / name).read_text(encoding="utf-8")))

    return read


@pytest.fixture
def configured(tmp_path: Path) -> Configured:
    """The configuration of an environment; every secret's file holds `secret`, the store is memory."""
    secret = tmp_path / "secret"
    secret.write_text("secret\n", encoding="utf-8")

    def read(environ: Mapping[str, str]) -> Config:
        ours = {name: value for name, value in environ.items() if name.startswith("COMPACTION_PROXY_")}
        files = {name: str(secret) for name in ours if name.endswith("_FILE")}
        return load_config(None, ours | files | {STORE_URL: "memory://"}).config

    return read


@pytest.fixture
def find_faults(tmp_path: Path) -> Callable[[list[dict[str, Any]]], str]:
    """What the schemas of the Prometheus operator and of the Gateway API find wrong with objects."""

    def check(objects: list[dict[str, Any]]) -> str:
        script = SCHEMAS / "validate.mjs"
        return play(script, tmp_path, 100, packages=SCHEMAS, OBJECTS=json.dumps(objects))

    return check
