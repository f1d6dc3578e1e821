"""Counting by characters: for those who configure `counter: characters`."""


class CharacterCounter:
    """⌈characters / 4⌉, whatever the model. `core.tokens.CHARACTERS` holds the framing that belongs to it.

    Cheap and blind: it counts dense text (Chinese, digits, JSON) up to 2.5 times too low.
    """

    def count(self, text: str, model: str) -> int:  # noqa: ARG002 - the port's signature
        """Tokens of `text`; the model does not matter."""
        return -(-len(text) // 4)
