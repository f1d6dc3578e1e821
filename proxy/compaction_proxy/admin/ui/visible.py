"""Text of conversations, made safe to look at: characters that hide, or turn others around, are shown.

What is markup to HTML is the templates' business: they escape everything. This is about what would mislead a
reader although it is only text.
"""

import re

# Controls but tab and line feed; soft hyphen; marks of direction; zero width but the joiners that scripts
# need; line and paragraph separators; tags; halves of surrogate pairs, which UTF-8 cannot hold.
_MISLEADING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def _named(match: re.Match[str]) -> str:
    return f"\N{MATHEMATICAL LEFT ANGLE BRACKET}U+{ord(match[0]):04X}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"


def visible(text: str) -> str:
    """The text, with `⟨U+202E⟩` where a character would mislead."""
    return _MISLEADING.sub(_named, text.replace("\r\n", "\n"))


def finalized(value: object) -> object:
    """What a template puts out for a value: text made visible, markup of our own as it is."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
