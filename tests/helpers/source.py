"""Parses source files for tests that check the code itself."""

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parse_source(path: Path) -> ast.Module:
    """Returns the syntax tree of a file.

    The garbage collector pauses meanwhile. It may log an error, for which Python parses source lines, and
    Python 3.11 fails with a `SystemError` if it parses within `ast.parse` (python/cpython#106905).
    """
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()
