"""Working out what a round shall be, once for all requests that ask for it at the same time.

A draft reads the whole conversation, so it costs far more than anything else that a request does without a
model. Retries and parallel requests of one conversation share it, as they share the round that follows.
"""

import asyncio

from compaction_proxy.compaction.ledger_cache import Gleanings
from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.request_view import View
from compaction_proxy.compaction.round_planning import Draft, drafted, pins_of


class Drafting:
    """Works out rounds, each once at a time.

    Args:
        reading: What counts.
        gleanings: What messages say and show.
    """

    def __init__(self, reading: Reading, gleanings: Gleanings) -> None:
        self._reading = reading
        self._gleanings = gleanings
        self._running: dict[asyncio.Task[Draft | None], tuple[object, ...]] = {}

    async def drafted(self, view: View, *, small: bool = False) -> Draft | None:
        """The round that the strategy would make of the request now, or None if there is nothing to take.

        Args:
            view: The request.
            small: Whether a round is wanted even where little can be won.
        """
        asked = _asked(view, small=small)
        same = (task for task, of in self._running.items() if of == asked)
        task = next(same, None) or self._begun(view, asked, small=small)
        return await asyncio.shield(task)  # whoever leaves takes nothing from the others

    def _begun(self, view: View, asked: tuple[object, ...], *, small: bool) -> asyncio.Task[Draft | None]:
        task = asyncio.create_task(drafted(view, self._reading, self._gleanings, small=small))
        self._running[task] = asked

        def ended(task: asyncio.Task[Draft | None]) -> None:
            del self._running[task]
            if not task.cancelled():
                task.exception()  # all who asked may have left: then nobody else looks at it

        task.add_done_callback(ended)
        return task


def _asked(view: View, *, small: bool) -> tuple[object, ...]:
    """Everything that a draft depends on."""
    return (
        view.ask.tenant,
        tuple(each.digest for each in view.messages),
        view.earlier,
        view.policy,
        view.gauge,
        view.room,
        pins_of(view),
        small,
    )
