"""Formats the output of `config show`: every key, its value and the origin of the value."""

import json
from collections.abc import Iterator
from functools import reduce

from compaction_proxy.config.keys import format_key_path, iter_keys, to_plain_value
from compaction_proxy.config.loader import LoadedConfig


def format_config_lines(loaded: LoadedConfig, *, with_origin: bool) -> Iterator[str]:
    """Yields one line per key: `section.key: value`. With `with_origin`, `# origin` follows the value."""
    for key in iter_keys():
        value = to_plain_value(reduce(getattr, map(str, key.path), loaded.config))
        line = f"{format_key_path(key.path)}: {json.dumps(value, ensure_ascii=False)}"
        yield f"{line}  # {loaded.origins[format_key_path(key.path)]}" if with_origin else line
