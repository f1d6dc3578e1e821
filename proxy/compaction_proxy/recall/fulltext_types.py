"""What ranks texts by how well they answer a query."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Passage(NamedTuple):  # made for each message of an archive
    """One message as a search sees it.

    Attributes:
        id: The message's id.
        text: Its whole text, whatever that holds.
        role: Its role.
    """

    id: str
    text: str
    role: str


class Found(NamedTuple):
    """One passage that a query found.

    Attributes:
        place: Its index in the sequence that the index was built of.
        score: Above 0 and at most 1, higher is better: how much of what was asked for stands there and around
            it, words that stand nowhere included. Exact within one query, and about the same between several.
        offset: Where in the passage's text the best match begins, in characters; 0 if it is found by its
            neighbours alone.
    """

    place: int
    score: float
    offset: int


class TextIndex(Protocol):
    """Passages that can be searched. Any thread may search, one at a time is served."""

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        ...

    def search(self, query: str, limit: int) -> list[Found]:
        """The best `limit` passages, best first; empty if nothing matches, or after `close`.

        Any text is a query: plain words rank, any of them is enough; a phrase in double quotes must stand in
        what is found; `word*` stands for every word that begins like that. Never raises.
        """
        ...

    def close(self) -> None:
        """Let go of the memory. Calling it twice does no harm."""
        ...


class FullText(Protocol):
    """Makes indexes of the messages of a conversation, or of several."""

    def build(self, passages: Sequence[Passage]) -> TextIndex:
        """An index of these, whatever they hold; neighbours in the sequence are neighbours in conversation.

        Takes seconds for many megabytes: call it in a thread.

        Raises:
            SearchUnavailable: This installation cannot search.
        """
        ...
