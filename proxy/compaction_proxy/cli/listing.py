"""`config show`: every key, its value, and where the value comes from."""

import json
from collections.abc import Iterator
from functools import reduce

from compaction_proxy.config.keys import dotted, keys, plain
from compaction_proxy.config.loader import Loaded


def lines(loaded: Loaded, *, with_origin: bool) -> Iterator[str]:
    """One line a key, `section.key: value` and the origin behind `#`."""
    for key in keys():
        value = plain(reduce(getattr, map(str, key.place), loaded.config))
        line = f"{dotted(key.place)}: {json.dumps(value, ensure_ascii=False)}"
        yield f"{line}  # {loaded.origins[dotted(key.place)]}" if with_origin else line
