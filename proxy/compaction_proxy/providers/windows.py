"""Looks up a model's context window by the model's name. Uses a cautious default for unknown models."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType

from compaction_proxy.core.model_names import normalize_model_name

# The shipped table: the context windows of current models, and the table's date and source.
# `.ci/window_table.py` writes the file.
TABLE = json.loads(files("compaction_proxy").joinpath("data", "windows.json").read_text("utf-8"))
# Context windows in input tokens, by model name. A key applies to the model with this name, and to each name
# that begins with the key and `-`, `:` or `@`, unless a longer key matches that name (`find_by_prefix`).
WINDOWS: Mapping[str, int] = MappingProxyType(TABLE["windows"])

# Context window that the proxy assumes for a model that is not in the table, in tokens. Nearly every current
# model takes at least this many. An upstream that takes fewer returns an error, from which `model_limits`
# learns the smaller context window.
FALLBACK_WINDOW = 128_000
_EDGES = "-:@"
# Patterns for the parts of a model name that providers spell differently, as in `us.openai.gpt-5.4`,
# `llama-v3p1`, `Meta-Llama-3.1` and `llama3.1`.
_VENDOR = re.compile(r"^(?:[a-z-]+\.)+(?=[a-z])")
_POINT = re.compile(r"(?<=\d)p(?=\d)")
_LLAMA = re.compile(r"^(?:meta-)?llama-?v?(?=\d)")


def normalize_name(model: str) -> str:
    """Returns a model's name without provider prefixes, in the spelling of the table `WINDOWS`."""
    name = _VENDOR.sub("", normalize_model_name(model))
    name = _LLAMA.sub("llama-", _POINT.sub(".", name))
    return name.replace(".", "-") if name.startswith("claude") else name


def find_by_prefix(name: str, table: Mapping[str, int]) -> int | None:
    """Returns the value of the longest key in `table` that matches `name`; None if no key matches.

    A key matches if it is equal to `name`, or to the part of `name` before one of its separators (`-`, `:`
    and `@`). For example, the key `gpt-4` matches `gpt-4-0613`, but not `gpt-4.1` or `gpt-4o`.
    """
    stop = len(name)
    while stop > 0:
        value = table.get(name[:stop])
        if value is not None:
            return value
        stop = max(name.rfind(edge, 0, stop) for edge in _EDGES)
    return None


@lru_cache(maxsize=1_024)
def find_shipped_window(model: str) -> int | None:
    """Returns a model's context window from the shipped table, in tokens; None if it is not listed."""
    return find_by_prefix(normalize_name(model), WINDOWS)


def get_known_window(model: str) -> int:
    """Returns a model's context window from the shipped table, in tokens, or else `FALLBACK_WINDOW`."""
    return find_shipped_window(model) or FALLBACK_WINDOW
