"""Asking for summaries: whom, in which form, in how many pieces, and what of the answers may be used.

A brief is answered in the aligned form, where it is wanted and fits, else from a transcript. A transcript
that the summary model cannot read at once is read in portions, and one more call makes one text of theirs.
Runs whose texts cannot be told apart get a call each. An answer that was cut at its output limit is used up
to its last whole line where it reaches the last section; else one more call asks for half the size.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from compaction_proxy.compaction.chunking import Group, halves, narrowed, portions, shown
from compaction_proxy.compaction.message_reader import Reading
from compaction_proxy.compaction.summary_client import Asking, Place, Price, Spent, unpriced
from compaction_proxy.compaction.summary_request import (
    Aligned,
    Brief,
    Sitting,
    SummaryRoute,
    Written,
    sitting,
)
from compaction_proxy.core.errors import SummaryFailed
from compaction_proxy.core.message import Message
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.core.summary.call import Conversation, SummaryAnswer, SummaryCall
from compaction_proxy.core.summary.prompt import aligned_prompt, is_unfinished, texts, validated
from compaction_proxy.core.summary.sections import has_last_section, repair_sections
from compaction_proxy.core.summary.verify import verified
from compaction_proxy.providers.types import SummaryModel
from compaction_proxy.support.offload import beside

__all__ = ["Aligned", "Brief", "Spent", "Summarising", "SummaryRoute", "Written"]

# After a call that was too long, this share of the summary model's window is filled: the count was wrong.
OVERFLOW_SHARE = 0.7
# What is cut to fit aims at this share of the room: what a character costs differs from place to place.
CAREFUL_SHARE = 0.9
# An answer with more characters for each token allowed than this is not what was asked for.
TOO_LONG = 32
MAX_PORTIONS = 12
PORTIONS_AT_ONCE = 2
LEAST_PORTION_TOKENS = 150
# The least that is asked of a call for one run.
LEAST_RUN_TOKENS = 60
NARROWINGS = 6
# Failures of an aligned call which a transcript may not share.
_OF_THE_FORM = frozenset({"overflow", "http-400", "http-413", "http-422"})


class CheckedAnswer(NamedTuple):
    """What may be used of an answer.

    Attributes:
        texts: One for each group; empty where the answer does not have the form that was asked for.
        is_partial: Whether the answer was cut before its last section, or holds nothing whole.
    """

    texts: tuple[str, ...]
    is_partial: bool = False


class Summarising:
    """Gets summaries written. One for a process: it remembers which models fail, and how long they take.

    Args:
        model: Who writes.
        reading: What counts.
        price: What calls cost.
        clock: Monotonic seconds.
        sleep: Waits for so many seconds.
        jitter: A random number, 0..1.
    """

    def __init__(
        self,
        model: SummaryModel,
        reading: Reading,
        *,
        price: Price = unpriced,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._asking = Asking(model, clock=clock, sleep=sleep, jitter=jitter)
        self._clock = clock
        self._reading = reading
        self.price = price

    @property
    def resting(self) -> bool:
        """Whether any model is being left alone right now."""
        return self._asking.resting

    async def write(self, brief: Brief) -> Written:
        """The texts that a brief asks for. The deadline is the caller's.

        Raises:
            SummaryFailed: There are none that may be used. Beside the reasons of the model, of validation and
                of verification: `no-model`, `summary-window` (it is too small for this), `breaker-open`,
                `budget`.
        """
        for route in brief.routes:
            self.price(route.model, route.url, 0, 0, 0)  # prices may have to be looked up first
        found, model = await self._answered(brief)
        if brief.shape.verified:
            found = await beside(partial(_verified, brief, found))
        return Written(found, model, brief.spent)

    def expected_s(self, brief: Brief) -> float | None:
        """How long a call to the first model asked may be expected to take; None if it is not known."""
        if not brief.routes:
            return None
        route = brief.routes[0]
        return self._asking.pace.expected_s(Place(brief.tenant, route.url, route.model))

    async def _answered(self, brief: Brief) -> tuple[tuple[str, ...], str]:
        """The texts, and who wrote them."""
        if not brief.routes:
            raise SummaryFailed("no-model")
        own = brief.routes[0]
        if brief.aligned is not None and brief.aligned.body.model in {"", own.model}:
            found = await self._aligned(brief, brief.aligned, own)
            if found:
                return found, own.model
        for route in brief.routes[:-1]:
            try:
                return await self._transcribed(brief, route), route.model
            except SummaryFailed as failed:
                if failed.reason != "unknown-model":
                    raise
        return await self._transcribed(brief, brief.routes[-1]), brief.routes[-1].model

    async def _aligned(self, brief: Brief, aligned: Aligned, route: SummaryRoute) -> tuple[str, ...]:
        """The texts, written by the conversation's own model behind the conversation itself.

        Empty where the call does not fit, the provider refuses its form, or several texts cannot be told
        apart.
        """
        conversation = Conversation(aligned.body.raw, aligned.messages)
        groups = len(brief.groups)
        prompt = partial(aligned_prompt, brief.instructions, language=brief.language, groups=groups)
        asked = prompt(tokens=brief.tokens)
        most = brief.shape.allowed(brief.tokens)
        new = [each for each in aligned.messages if not each.tokens]
        size = sum(each.tokens for each in aligned.messages)
        size += await self._size(brief, *new, Message(role="user", text=asked))
        size += await self._reading.overhead(aligned.body.prompt_members, brief.gauge)
        tokens = int(size * brief.ratio) + most + route.dialect.asking.allowance(route.model, conversation)
        if tokens > route.window:
            return ()
        call = SummaryCall(
            url=route.url,
            headers=route.headers,
            model=route.model,
            system="",
            prompt=asked,
            max_tokens=most,
            temperature=brief.shape.temperature,
            wire=route.dialect.name,
            conversation=conversation,
        )
        read = partial(self._read, brief, brief.tokens, groups, cut=brief.shape.cut)

        async def ask(size_tokens: int) -> CheckedAnswer:
            sized = replace(call, prompt=prompt(tokens=size_tokens))
            return await self._asking.ask(sized, brief.account, read, tokens=tokens)

        with self._asking.admitted(brief.account, route.url, route.model):
            try:
                return await self._ask_again(brief, ask, brief.tokens, groups)
            except SummaryFailed as failed:
                if failed.reason not in _OF_THE_FORM:
                    raise
                return ()

    async def _ask_again(
        self, brief: Brief, ask: Callable[[int], Awaitable[CheckedAnswer]], tokens: int, count: int
    ) -> tuple[str, ...]:
        """Returns one text for each group; asks once more, in half the size, where an answer was cut.

        What the first answer holds is used where the second one fails, and at once where the deadline leaves
        no time for a second one.

        Args:
            brief: What is wanted.
            ask: Asks for a size, in tokens.
            tokens: The size to ask for at first.
            count: How many texts are wanted.

        Returns:
            The texts; empty where there are several and they cannot be told apart.

        Raises:
            SummaryFailed: `truncated`; both answers were cut, and hold too little. `garbage`; a single text
                lacks most of its sections.
        """
        started = self._clock()
        answer = await ask(tokens)
        took_s = self._clock() - started
        late = bool(answer.texts) and 0 < brief.deadline_s < 2 * took_s
        if answer.is_partial and not late:
            answer = await self._ask_for_half(answer, ask, tokens)
        if not answer.texts and count == 1:
            raise SummaryFailed("garbage")
        return answer.texts

    async def _ask_for_half(
        self, first: CheckedAnswer, ask: Callable[[int], Awaitable[CheckedAnswer]], tokens: int
    ) -> CheckedAnswer:
        """Returns the answer to a second call, or the first one where that one is no better.

        Raises:
            SummaryFailed: Neither can be used.
        """
        try:
            second = await ask(max(1, tokens // 2))
        except SummaryFailed:
            if not first.texts:
                raise
            return first
        if not (second.texts or first.texts):
            raise SummaryFailed("truncated")
        return second if second.texts else first

    async def _transcribed(self, brief: Brief, route: SummaryRoute) -> tuple[str, ...]:
        """The texts by one model; if a call is too long for it, once more in a smaller window."""
        with self._asking.admitted(brief.account, route.url, route.model):
            try:
                return await self._condensed(sitting(brief, route, route.window), brief.groups, brief.shape)
            except SummaryFailed as failed:
                if failed.reason != "overflow":
                    raise
                window = int(min(failed.limit or route.window, route.window) * OVERFLOW_SHARE)
            return await self._condensed(sitting(brief, route, window), brief.groups, brief.shape)

    async def _condensed(
        self, at: Sitting, groups: tuple[Group, ...], shape: SummaryShape
    ) -> tuple[str, ...]:
        """A text for each group: by one call if the model can read them at once."""
        asked = await at.prompt(groups, shape)
        size = await self._call_size(at, asked)
        if size <= at.room:
            together = await self._asked(at, groups, shape, asked, size, cut=shape.cut)
            return together or await self._one_by_one(at, groups, shape)
        messages = tuple(each for group in groups for each in group)
        characters = await beside(partial(shown, messages, shape)) * await self._share(at, size)
        shape = await beside(partial(narrowed, messages, shape, MAX_PORTIONS * characters))
        if len(groups) == 1:
            return (await self._reduced(at, groups[0], shape, characters),)
        found: list[str] = []
        for half in halves(groups, shape):
            share = sum(shown(each, shape) for each in half) / shown(messages, shape)
            part = replace(at, tokens=max(1, int(at.tokens * share)))
            found += await self._condensed(part, half, shape)
        return tuple(found)

    async def _one_by_one(
        self, at: Sitting, groups: tuple[Group, ...], shape: SummaryShape
    ) -> tuple[str, ...]:
        """A text for each group by a call of its own, earliest first; empty for those that are too many."""
        sizes = [shown(each, shape) for each in groups]
        first = groups[:MAX_PORTIONS]
        found: list[str] = []
        for start in range(0, len(first), PORTIONS_AT_ONCE):
            stop = start + PORTIONS_AT_ONCE
            some = zip(first[start:stop], sizes[start:stop], strict=True)
            parts = [
                (replace(at, tokens=max(LEAST_RUN_TOKENS, at.tokens * size // sum(sizes))), each)
                for each, size in some
            ]
            found += await _together(self._one_text(part, each, shape) for part, each in parts)
        return (*found, *[""] * (len(groups) - len(found)))

    async def _one_text(self, at: Sitting, group: Group, shape: SummaryShape) -> str:
        [text] = await self._condensed(at, (group,), shape)
        return text

    async def _reduced(self, at: Sitting, group: Group, shape: SummaryShape, characters: float) -> str:
        """One text for a group that is too large to be read at once."""
        cut = await beside(partial(portions, group, shape, characters))
        if len(cut) > MAX_PORTIONS:  # edges of units waste room
            shape = await beside(partial(narrowed, group, shape, MAX_PORTIONS * characters / 2))
            cut = await beside(partial(portions, group, shape, characters))
        if len(cut) > MAX_PORTIONS:
            raise SummaryFailed("summary-window")
        if len(cut) == 1:
            return await self._squeezed(at, group, shape, cut=shape.cut)
        tokens = max(LEAST_PORTION_TOKENS, min(at.tokens, int(at.room / 2 / len(cut))))
        smaller = replace(at, tokens=min(tokens, at.tokens), earlier=())
        parts: list[str] = []
        for start in range(0, len(cut), PORTIONS_AT_ONCE):
            some = cut[start : start + PORTIONS_AT_ONCE]
            parts += await _together(self._squeezed(smaller, each, shape, cut=True) for each in some)
        records = tuple(
            Message(role="assistant", text=f"Record of part {number} of {len(parts)}:\n{text}")
            for number, text in enumerate(parts, 1)
        )
        whole = replace(shape, message_characters=max(len(each.text) for each in records))
        return await self._squeezed(at, records, whole, cut=shape.cut)

    async def _squeezed(self, at: Sitting, group: Group, shape: SummaryShape, *, cut: bool) -> str:
        """One text by one call, whatever of the messages must be left out for it."""
        for _ in range(NARROWINGS):
            asked = await at.prompt((group,), shape)
            size = await self._call_size(at, asked)
            if size <= at.room:
                [text] = await self._asked(at, (group,), shape, asked, size, cut=cut)
                return text
            share = await self._share(at, size)
            shape = await beside(partial(_shape_for_share, group, shape, share))
        raise SummaryFailed("summary-window")

    async def _share(self, at: Sitting, size: int) -> float:
        """Which share of what a prompt of this size shows would fit.

        Raises:
            SummaryFailed: `summary-window`; there is no room beside what is the same in every call.
        """
        fixed = await self._call_size(at, await at.prompt(((),), at.brief.shape))
        if fixed >= at.room:
            raise SummaryFailed("summary-window")
        return CAREFUL_SHARE * (at.room - fixed) / max(1, size - fixed)

    async def _asked(
        self,
        at: Sitting,
        groups: tuple[Group, ...],
        shape: SummaryShape,
        asked: str,
        size: int,
        *,
        cut: bool,
    ) -> tuple[str, ...]:
        """The texts by one call, or two; empty where there are several and they cannot be told apart."""
        read = partial(self._read, at.brief, at.tokens, len(groups), cut=cut)
        tokens = int(size * at.brief.ratio) + at.answer_tokens

        async def ask(size_tokens: int) -> CheckedAnswer:
            smaller = replace(at, tokens=size_tokens)
            prompt = asked if size_tokens == at.tokens else await smaller.prompt(groups, shape)
            return await self._asking.ask(at.call(prompt), at.brief.account, read, tokens=tokens)

        return await self._ask_again(at.brief, ask, at.tokens, len(groups))

    async def _read(
        self, brief: Brief, tokens: int, count: int, answer: SummaryAnswer, *, cut: bool
    ) -> CheckedAnswer:
        """What may be used of an answer."""
        characters = len(answer.text)
        if characters > TOO_LONG * brief.shape.allowed(tokens) and not cut:
            raise SummaryFailed("longer")
        size = await self._size(brief, Message(role="assistant", text=answer.text)) if cut else 0
        try:
            whole = validated(
                answer.text,
                answer.finish_reason,
                called_tools=answer.called_tools,
                refused=answer.refused,
                cut_characters=characters * tokens // max(tokens, size) if cut else None,
            )
            found = texts(whole, count)
        except SummaryFailed as failed:
            if count > 1 and failed.reason in {"garbage", "truncated"}:
                return CheckedAnswer(())
            if failed.reason == "truncated":
                return CheckedAnswer((), is_partial=True)
            raise
        sections = () if cut or count > 1 else brief.shape.sections
        if not sections:
            return CheckedAnswer(found)
        is_cut = is_unfinished(answer.finish_reason)
        text = repair_sections(found[0], sections, is_cut=is_cut)
        is_partial = is_cut and not (text and has_last_section(found[0], sections))
        return CheckedAnswer((text,) if text else (), is_partial)

    async def _call_size(self, at: Sitting, asked: str) -> int:
        """Counted tokens of a transcript call."""
        system = Message(role="system", text=at.brief.instructions)
        return await self._size(at.brief, system, Message(role="user", text=asked))

    async def _size(self, brief: Brief, *messages: Message) -> int:
        return sum(each.tokens for each in await self._reading.counted(messages, brief.gauge))


async def _together(calls: Iterable[Coroutine[object, object, str]]) -> list[str]:
    """What all give; if one fails, its failure, once none is under way any more."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    failures = (each for each in results if isinstance(each, BaseException))
    failed = next(failures, None)
    if failed is not None:
        raise failed
    return [each for each in results if isinstance(each, str)]


def _shape_for_share(group: Group, shape: SummaryShape, share: float) -> SummaryShape:
    """Returns a shape that shows this share of what the shape shows of a group."""
    return narrowed(group, shape, shown(group, shape) * share)


def _verified(brief: Brief, found: tuple[str, ...]) -> tuple[str, ...]:
    """The texts without what their groups do not back, and with the states of requests as they are."""
    return tuple(
        verified(
            text,
            sources=(*brief.said, *group),
            earlier=brief.earlier,
            language=brief.language,
            states=brief.states,
            characters=brief.characters // len(brief.groups),
        )
        for text, group in zip(found, brief.groups, strict=True)
    )
