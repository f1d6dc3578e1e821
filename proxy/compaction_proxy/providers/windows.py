"""How large a model's window is by its name alone: the shipped table, else a cautious figure."""

import re
from collections.abc import Mapping
from functools import lru_cache

from compaction_proxy.core.model_names import normalize_model_name
from compaction_proxy.providers.window_table import WINDOWS

# What nearly every current model takes at least, in tokens; an upstream that takes less says so.
FALLBACK_WINDOW = 128_000
_EDGES = "-:@"
# What hosts make of names: `us.openai.gpt-5.4`, `llama-v3p1`, `Meta-Llama-3.1`, `llama3.1`, `claude-opus-4.5`
_VENDOR = re.compile(r"^(?:[a-z-]+\.)+(?=[a-z])")
_POINT = re.compile(r"(?<=\d)p(?=\d)")
_LLAMA = re.compile(r"^(?:meta-)?llama-?v?(?=\d)")


def normalize_name(model: str) -> str:
    """A model's bare name in the spelling of the table."""
    name = _VENDOR.sub("", normalize_model_name(model))
    name = _LLAMA.sub("llama-", _POINT.sub(".", name))
    return name.replace(".", "-") if name.startswith("claude") else name


def find_by_prefix(name: str, table: Mapping[str, int]) -> int | None:
    """The value of the longest key that a name is, or continues after an edge such as `-`; or None.

    So `gpt-4` speaks for `gpt-4-0613` and not for `gpt-4.1` or `gpt-4o`.
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
    """The largest input of a model, in tokens, as the shipped table has it; None: it does not."""
    return find_by_prefix(normalize_name(model), WINDOWS)


def get_known_window(model: str) -> int:
    """The largest input of a model, in tokens, as far as its name says it."""
    return find_shipped_window(model) or FALLBACK_WINDOW
