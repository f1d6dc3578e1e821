"""Which JSON inside a text is built into values: a list takes eighty bytes for the two that write it."""

# More brackets than this are left as text. It is the most whose values fit in a mebibyte and thirty times the
# bytes that write them; brackets inside strings count, too, because telling them apart takes longer.
MAX_BRACKETS = 16_000


def is_crowded(text: str) -> bool:
    """Whether JSON would take much more memory as values than it takes as text."""
    return text.count("[") + text.count("{") > MAX_BRACKETS
