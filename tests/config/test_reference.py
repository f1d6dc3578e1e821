"""config.yaml and docs/configuration.md say what the model says."""

import re
import runpy
from itertools import chain
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from compaction_proxy.config.config import (
    Config,
    ConfigKey,
    build_policy,
    format_key_path,
    get_model_settings,
    iter_keys,
)
from compaction_proxy.config.loader import load_config
from compaction_proxy.config.sections import ModelSection
from compaction_proxy.config.validation import resolve_store_url
from compaction_proxy.core.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "config_reference.py"))


def named(value: object, above: str = "") -> set[str]:
    """The dotted places that a YAML document names."""
    if not isinstance(value, dict) or (not value and above):
        return {above}
    return {place for name, inner in value.items() for place in named(inner, f"{above}.{name}".lstrip("."))}


def test_the_shipped_file_equals_the_defaults() -> None:
    home = {"HOME": str(ROOT)}
    loaded = load_config(ROOT / "config.yaml", home)
    defaults = Config()
    store = defaults.store.model_copy(update={"url": resolve_store_url(defaults, home)})
    assert loaded.config == defaults.model_copy(update={"store": store})
    assert loaded.warnings == ()


def test_the_shipped_file_names_every_working_key() -> None:
    document = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    working = {format_key_path(key.path) for key in iter_keys() if key.is_supported}
    assert working - named(document) == set()
    assert named(document) - working == set()


def test_the_documentation_has_a_row_for_every_key_and_no_other() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    expected = list(chain.from_iterable(SCRIPT["tables"]().values()))
    assert re.findall(r"^\| `.*$", text, re.MULTILINE) == expected


def test_the_shipped_file_explains_every_field_of_a_strategy() -> None:
    assert "\n".join(SCRIPT["strategies"]()) in (ROOT / "config.yaml").read_text(encoding="utf-8")


def test_every_key_says_what_it_means() -> None:
    assert [format_key_path(key.path) for key in iter_keys() if not key.description.endswith(".")] == []


@pytest.mark.parametrize(
    "key", [*iter_keys(), *iter_keys(ModelSection)], ids=lambda key: format_key_path(key.path)
)
def test_no_value_to_choose_is_lost_where_yaml_takes_it_for_a_boolean(key: ConfigKey) -> None:
    choices = [choice for choice in getattr(key.value_type, "__args__", ()) if isinstance(choice, str)]
    if isinstance(key.default, str):
        choices.append(key.default)
    for choice in choices:
        written = yaml.safe_load(choice or "''")
        if isinstance(written, bool):
            value: object = written
            for step in reversed(key.path):
                value = {step: value}
            assert attrgetter(".".join(map(str, key.path)))(Config.model_validate(value)) == choice


def test_the_shipped_file_leaves_every_strategy_as_it_is() -> None:
    settings = get_model_settings(load_config(ROOT / "config.yaml", {"HOME": str(ROOT)}).config, "any")
    assert {name: build_policy(settings, name) for name in STRATEGIES} == STRATEGIES
