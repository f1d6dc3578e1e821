"""Counting by characters: for those who configure `counter: characters`."""

from collections.abc import Sequence


class CharacterCounter:
    """⌈characters / 4⌉, whatever the model. `core.token_rules.CHARACTERS` holds its framing.

    Cheap and blind: it counts dense text (Chinese, digits, JSON) up to 2.5 times too low.
    """

    def count(self, text: str, model: str) -> int:  # noqa: ARG002 - the port's signature
        """Tokens of `text`; the model does not matter."""
        return -(-len(text) // 4)

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Tokens of every text."""
        return [self.count(text, model) for text in texts]
