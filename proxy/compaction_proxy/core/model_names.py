"""What a model's name says about it: the family, and for Claude the generation."""

import re
from collections.abc import Mapping
from typing import TypeVar

_NAME_CHARACTERS = 200  # a name is the client's to choose
_CLAUDE_VERSION = re.compile(r"claude-(?:v|(?:[a-z]+-)*)(\d+)(?:[-.](\d{1,2}))?(?!\d)")
_CLAUDE_NEW = (4, 7)

Value = TypeVar("Value")


def normalize_model_name(model: str) -> str:
    """The name in lower case without a router's path, a fine-tune's mark or a cloud's vendor prefix."""
    name = model[-_NAME_CHARACTERS:].lower().rpartition("/")[2].removeprefix("ft:")
    return name[max(0, name.find("claude")) :]


def find_by_prefix(name: str, table: Mapping[str, Value]) -> Value | None:
    """The value of the longest key that a bare name begins with, or None."""
    fitting = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(fitting, key=len)] if fitting else None


def is_new_claude(name: str) -> bool:
    """Whether a bare name is a Claude of the second vocabulary (4.7 and later); one without a number is."""
    if not name.startswith("claude"):
        return False
    found = _CLAUDE_VERSION.match(name)
    return found is None or (int(found[1]), int(found[2] or 0)) >= _CLAUDE_NEW
