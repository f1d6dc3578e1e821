"""config.yaml and docs/configuration.md say what the model says."""

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from proxy.compaction.policies import policy_for
from proxy.config.checks import store_url
from proxy.config.keys import Key, dotted, keys, plain
from proxy.config.model import Config, for_model
from proxy.config.sections import ModelSection, TriggerRow
from proxy.config.sources import load
from proxy.core.policy import CHAINED

ROOT = Path(__file__).resolve().parents[2]
ROWS: tuple[tuple[str, type[BaseModel], str], ...] = (
    (
        "rows of compaction.trigger",
        TriggerRow,
        "The fields of one row must all be reached; a 0 switches its row off.",
    ),
    ("entries of models", ModelSection, "Null sections change nothing."),
)


def row(key: Key) -> str:
    """A key's line in docs/configuration.md."""
    default = json.dumps(plain(key.default), ensure_ascii=False)
    shown = "23 headers, see config.yaml" if len(default) > 80 else f"`{default}`"
    return f"| `{dotted(key.place)}`{'' if key.works else ' †'} | {shown} | {key.description} |"


def named(value: object, above: str = "") -> set[str]:
    """The dotted places that a YAML document names."""
    if not isinstance(value, dict) or (not value and above):
        return {above}
    return {place for name, inner in value.items() for place in named(inner, f"{above}.{name}".lstrip("."))}


def test_the_shipped_file_equals_the_defaults() -> None:
    home = {"HOME": str(ROOT)}
    loaded = load(ROOT / "config.yaml", home)
    defaults = Config()
    store = defaults.store.model_copy(update={"url": store_url(defaults, home)})
    assert loaded.config == defaults.model_copy(update={"store": store})
    assert loaded.warnings == ()


def test_the_shipped_file_names_every_working_key() -> None:
    document = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    working = {dotted(key.place) for key in keys() if key.works}
    assert working - named(document) == set()
    assert named(document) - working == {"compaction.strategy"}


def test_the_documentation_has_a_row_for_every_key_and_no_other() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    expected = [row(key) for key in keys()]
    expected += [row(key) for _, section, _ in ROWS for key in keys(section)]
    assert re.findall(r"^\| `.*$", text, re.MULTILINE) == expected


def test_every_key_says_what_it_means() -> None:
    assert [dotted(key.place) for key in keys() if not key.description.endswith(".")] == []


@pytest.mark.parametrize("key", [*keys(), *keys(ModelSection)], ids=lambda key: dotted(key.place))
def test_no_value_to_choose_is_a_boolean_for_yaml(key: Key) -> None:
    choices = [choice for choice in getattr(key.kind, "__args__", ()) if isinstance(choice, str)]
    if isinstance(key.default, str):
        choices.append(key.default)
    assert [choice for choice in choices if isinstance(yaml.safe_load(choice or "''"), bool)] == []


def test_the_defaults_make_the_strategy_s_own_row() -> None:
    assert policy_for(for_model(Config(), "any")) == CHAINED
