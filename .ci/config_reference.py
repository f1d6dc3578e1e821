"""Rewrite config.yaml's strategies, docs/configuration.md's tables and docs/strategies.md's table of keys.

    uv run python .ci/config_reference.py

For after a default, a meaning, a key or a strategy has changed. tests/config/test_reference.py and
tests/docs/test_strategies.py compare them. What else stands in these files is written by hand and left alone.
"""

# ruff: noqa: INP001 - a script, not a package

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import yaml
from pydantic_core import PydanticUndefined

from compaction_proxy.config.config import Config, ConfigKey, format_key_path, iter_keys, to_plain_value
from compaction_proxy.config.sections import ModelSection, PricesSection, SurchargeSection, TriggerRow
from compaction_proxy.config.strategies import POLICY_FIELDS, StrategiesSection

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("compaction", "strategies")
# Longer defaults are not shown in a table, in characters.
LONG = 80
# What the table in docs/strategies.md shows where a strategy does not have a key.
ABSENT = "–"  # noqa: RUF001 - as the page writes it


def yaml_value(value: object) -> str:
    """A default as the file writes it."""
    return '""' if value == "" else yaml.safe_dump(to_plain_value(value)).partition("\n")[0]


def strategies() -> Iterator[str]:
    """The lines of config.yaml below `strategies:`."""
    ours = (key for key in iter_keys() if key.path[:2] == STRATEGIES)
    for name, fields in groupby(ours, lambda key: str(key.path[2])):
        yield f"    {name}:"
        for key in fields:
            yield f"      # {key.description}"
            yield f"      {key.path[-1]}: {yaml_value(key.default)}"


def table_row(key: ConfigKey) -> str:
    """A key's line in the documentation."""
    if key.default is PydanticUndefined:
        return f"| `{format_key_path(key.path)}` | required | {key.description} |"
    value = to_plain_value(key.default)
    default = json.dumps(value, ensure_ascii=False)
    shown = f"`{default}`"
    if isinstance(value, list | tuple) and len(default) > LONG:
        shown = f"{len(value)} headers, see config.yaml"
    return (
        f"| `{format_key_path(key.path)}`{'' if key.is_supported else ' †'} | {shown} | {key.description} |"
    )


def tables() -> dict[str, list[str]]:
    """The rows of each table, by its heading."""
    by_section = {name: [key for key in iter_keys() if key.path[0] == name] for name in Config.model_fields}
    by_section["rows of compaction.trigger"] = list(iter_keys(TriggerRow))
    by_section["entries of models"] = list(iter_keys(ModelSection))
    by_section["prices of a model"] = list(iter_keys(PricesSection))
    by_section["surcharge on prices"] = list(iter_keys(SurchargeSection))
    return {heading: [table_row(key) for key in found] for heading, found in by_section.items()}


def with_rows(text: str, heading: str, rows: list[str]) -> str:
    """The documentation with the rows of one table replaced."""
    table = re.compile(rf"(?<=\n### {re.escape(heading)}\n)((?:(?!###)(?!\| `).*\n)*)(?:\| `.*\n)+")
    return table.sub(lambda found: found[1] + "\n".join(rows) + "\n", text)


def key_table() -> list[str]:
    """The lines of the table in docs/strategies.md: each key, and its default in each strategy."""
    sections = {name: dict(section) for name, section in StrategiesSection()}
    written = dict.fromkeys(key for section in sections.values() for key in section)
    keys = [
        *(key for key in POLICY_FIELDS if key in written),
        *(key for key in written if key not in POLICY_FIELDS),
    ]
    table = [["key", *(f"`{name}`" for name in sections)], ["---"] * (len(sections) + 1)]
    for key in keys:
        defaults = (section.get(key, ABSENT) for section in sections.values())
        table.append(
            [f"`{key}`", *(each if isinstance(each, str) else json.dumps(each) for each in defaults)]
        )
    return [f"| {' | '.join(row)} |" for row in table]


def main() -> None:
    """Rewrite the three files."""
    shipped = ROOT / "config.yaml"
    text = shipped.read_text(encoding="utf-8")
    below = "\n".join(strategies()) + "\n"
    text = re.sub(r"(?<=\n  strategies:\n)(?: {4}.*\n)+", lambda _: below, text)
    shipped.write_text(text, encoding="utf-8")
    reference = ROOT / "docs" / "configuration.md"
    text = reference.read_text(encoding="utf-8")
    for heading, rows in tables().items():
        text = with_rows(text, heading, rows)
    reference.write_text(text, encoding="utf-8")
    page = ROOT / "docs" / "strategies.md"
    table = "\n".join(key_table()) + "\n"
    text = re.sub(r"(?m)^\| key \|.*\n(?:\|.*\n)+", lambda _: table, page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
