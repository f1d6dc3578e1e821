"""Determines the family of a model, and the generation of a Claude model, from the name of the model."""

import re
from collections.abc import Mapping
from typing import TypeVar

_NAME_CHARACTERS = 200  # only the end of a longer name is read, because a client may send any name
_CLAUDE_VERSION = re.compile(r"claude-(?:v|(?:[a-z]+-)*)(\d+)(?:[-.](\d{1,2}))?(?!\d)")
_CLAUDE_NEW = (4, 7)

Value = TypeVar("Value")


def normalize_model_name(model: str) -> str:
    """Returns the name of a model in lower case and without prefixes.

    The prefixes are a router's path, such as `openai/`, the `ft:` of a fine-tuned model, and a cloud vendor's
    prefix before `claude`.
    """
    name = model[-_NAME_CHARACTERS:].lower().rpartition("/")[2].removeprefix("ft:")
    return name[max(0, name.find("claude")) :]


def find_by_prefix(name: str, table: Mapping[str, Value]) -> Value | None:
    """Returns the value of the longest key with which a normalized name begins, or None if no key fits."""
    fitting = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(fitting, key=len)] if fitting else None


def is_new_claude(name: str) -> bool:
    """Returns whether a name belongs to a Claude model with the newer token vocabulary (4.7 and later).

    A Claude model without a version in its name counts as new.
    """
    if not name.startswith("claude"):
        return False
    version = _CLAUDE_VERSION.match(name)
    return version is None or (int(version[1]), int(version[2] or 0)) >= _CLAUDE_NEW
