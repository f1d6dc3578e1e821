"""Requests summaries: chooses the model, the form and the number of calls, and checks the answers.

A summary request uses the aligned form if the caller provides the conversation (`SummaryRequest.aligned`) and
the call fits the model's context window. Otherwise, it uses the transcript form. If a transcript is too long
for one call, it is sent in portions, and one more call merges their summaries.

One call may ask for the summaries of several runs of messages. If the answer does not mark where each summary
begins, each run gets a call of its own. An answer that was cut at its output limit is used if it reaches the
last section. Otherwise, one more call asks for half the size.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.summary_client import (
    PriceLookup,
    SummaryClient,
    SummaryEndpoint,
    SummaryUsage,
    lookup_no_price,
)
from compaction_proxy.compaction.summary_request import (
    AlignedConversation,
    Group,
    RoutedSummaryRequest,
    Summary,
    SummaryRequest,
    SummaryRoute,
    count_shown_characters,
    route_summary_request,
    shrink_shape_to_fit,
    split_into_halves,
    split_into_portions,
)
from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.message import Message
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.core.summary.answer import (
    has_last_section,
    is_unfinished,
    repair_sections,
    split_run_texts,
    validate_summary,
)
from compaction_proxy.core.summary.call import ContinuedConversation, SummaryAnswer, SummaryCall
from compaction_proxy.core.summary.prompt import build_aligned_prompt
from compaction_proxy.core.summary.verify import verify_summary
from compaction_proxy.providers.types import SummaryModel
from compaction_proxy.support.offload import run_in_worker

__all__ = ["AlignedConversation", "Summarizer", "Summary", "SummaryRequest", "SummaryRoute", "SummaryUsage"]

# If a call was too long for the summary model, the next calls fill only this share of its context window,
# because the token count was wrong.
OVERFLOW_SHARE = 0.7
# If messages are shortened by characters to fit a call, they may fill only this share of the available
# tokens, because the number of tokens per character varies.
CAREFUL_SHARE = 0.9
# An answer with more characters than this for each allowed token is refused, because it is not what was asked
# for.
MAX_CHARACTERS_A_TOKEN = 32
# At most this many portions are summarised by separate calls, and at most this many at the same time. The
# summary of a portion may take at least this many tokens.
MAX_PORTIONS = 12
PORTIONS_AT_ONCE = 2
LEAST_PORTION_TOKENS = 150
# The smallest size that a call for a single run of messages asks for, in tokens.
LEAST_RUN_TOKENS = 60
# How often messages are shortened further until a call fits. After that, the summary fails.
NARROWINGS = 6
# If an aligned call fails for one of these reasons, the summary is requested again as a transcript.
_FORM_FAILURES = frozenset({"overflow", "http-400", "http-413", "http-422"})


class CheckedAnswer(NamedTuple):
    """The usable texts of an answer.

    Attributes:
        texts: One text for each group; empty if the answer cannot be used.
        is_partial: Whether the answer was cut off too early, so that a shorter one should be requested.
    """

    texts: tuple[str, ...]
    is_partial: bool = False


class Summarizer:
    """Requests summaries. A process has one instance, which remembers which models fail or are slow.

    Args:
        model: Sends the calls to summary models.
        reader: Counts tokens.
        price: Returns the price of a call.
        clock: Returns monotonic seconds.
        sleep: Waits for a number of seconds.
        jitter: Returns a random number, 0..1.
    """

    def __init__(
        self,
        model: SummaryModel,
        reader: MessageReader,
        *,
        price: PriceLookup = lookup_no_price,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = SummaryClient(model, clock=clock, sleep=sleep, jitter=jitter)
        self._clock = clock
        self._reader = reader
        self.price = price

    @property
    def has_resting_model(self) -> bool:
        """Whether any summary model currently gets no calls because it has failed."""
        return self._client.has_resting_model

    async def write_summary(self, summary_request: SummaryRequest) -> Summary:
        """Writes the texts that a summary request asks for. The caller sets the deadline.

        Raises:
            SummaryError: There are no usable texts. The reason comes from the model, from validation or from
                verification, or it is one of these: `no-model` (there is no summary model), `summary-window`
                (the model's context window is too small), `breaker-open` (the model gets no calls because it
                has failed) and `budget` (the tenant has no calls left).
        """
        for route in summary_request.routes:
            self.price(route.model, route.url, 0, 0, 0)  # starts the lookup, so the price is known in time
        texts, model = await self._summarize_via_routes(summary_request)
        if summary_request.shape.is_verified:
            texts = await run_in_worker(partial(_verify_texts, summary_request, texts))
        return Summary(texts, model, summary_request.usage)

    def estimate_call_duration_s(self, summary_request: SummaryRequest) -> float | None:
        """Estimates how long a call to the first model takes, in seconds; None if that is unknown."""
        if not summary_request.routes:
            return None
        route = summary_request.routes[0]
        return self._client.latency.estimate_call_duration_s(
            SummaryEndpoint(summary_request.tenant, route.url, route.model)
        )

    async def _summarize_via_routes(self, summary_request: SummaryRequest) -> tuple[tuple[str, ...], str]:
        """Returns the texts and the name of the model that wrote them."""
        if not summary_request.routes:
            raise SummaryError("no-model")
        first_route = summary_request.routes[0]
        if summary_request.aligned is not None and summary_request.aligned.body.model in {
            "",
            first_route.model,
        }:
            texts = await self._summarize_via_conversation(
                summary_request, summary_request.aligned, first_route
            )
            if texts:
                return texts, first_route.model
        for route in summary_request.routes[:-1]:
            try:
                return await self._summarize_via_transcript(summary_request, route), route.model
            except SummaryError as failed:
                if failed.reason != "unknown-model":
                    raise
        return await self._summarize_via_transcript(
            summary_request, summary_request.routes[-1]
        ), summary_request.routes[-1].model

    async def _summarize_via_conversation(
        self, summary_request: SummaryRequest, aligned: AlignedConversation, route: SummaryRoute
    ) -> tuple[str, ...]:
        """Requests the texts from the conversation's own model, in the aligned form.

        The call consists of the conversation itself, followed by the prompt. Returns no texts if the call
        does not fit, if the provider refuses its form, or if the answer does not mark where each text begins.
        """
        conversation = ContinuedConversation(aligned.body.raw, aligned.messages)
        groups = len(summary_request.groups)
        prompt = partial(
            build_aligned_prompt,
            summary_request.instructions,
            language=summary_request.language,
            run_count=groups,
        )
        prompt_text = prompt(max_tokens=summary_request.tokens)
        max_tokens = summary_request.shape.compute_max_tokens(summary_request.tokens)
        uncounted = [each for each in aligned.messages if not each.tokens]
        size = sum(each.tokens for each in aligned.messages)
        size += await self._count_tokens(summary_request, *uncounted, Message(role="user", text=prompt_text))
        size += await self._reader.count_overhead(
            aligned.body.prompt_members, summary_request.counting_options
        )
        tokens = (
            int(size * summary_request.calibration_ratio)
            + max_tokens
            + route.wire.summary_call_format.get_thinking_allowance(route.model, conversation)
        )
        if tokens > route.window:
            return ()
        call = SummaryCall(
            url=route.url,
            headers=route.headers,
            model=route.model,
            system="",
            prompt=prompt_text,
            max_tokens=max_tokens,
            temperature=summary_request.shape.temperature,
            wire=route.wire.name,
            conversation=conversation,
        )
        response_parser = partial(
            self._check_answer,
            summary_request,
            summary_request.tokens,
            groups,
            can_cut=summary_request.shape.may_cut,
        )

        async def ask_for_size(size_tokens: int) -> CheckedAnswer:
            sized = replace(call, prompt=prompt(max_tokens=size_tokens))
            return await self._client.call_model(
                sized, summary_request.account, response_parser, tokens=tokens
            )

        with self._client.admit_calls(summary_request.account, route.url, route.model):
            try:
                return await self._ask_until_complete(
                    summary_request, ask_for_size, summary_request.tokens, groups
                )
            except SummaryError as failed:
                if failed.reason not in _FORM_FAILURES:
                    raise
                return ()

    async def _ask_until_complete(
        self,
        summary_request: SummaryRequest,
        ask_for_size: Callable[[int], Awaitable[CheckedAnswer]],
        tokens: int,
        text_count: int,
    ) -> tuple[str, ...]:
        """Returns one text for each group. If the answer was cut too early, asks again for half the size.

        If the second call fails, the texts of the first answer are used. They are also used if the deadline
        leaves no time for a second call.

        Args:
            summary_request: The summary request.
            ask_for_size: Sends a call that asks for a size in tokens.
            tokens: The size to ask for first.
            text_count: Number of texts that are wanted.

        Returns:
            The texts. If several are wanted, the result is empty if the answer does not mark where each text
            begins.

        Raises:
            SummaryError: `truncated`: both answers were cut and hold too little. `garbage`: one text is
                wanted, but the answer lacks most of its sections. Other reasons come from `ask_for_size`.
        """
        started = self._clock()
        answer = await ask_for_size(tokens)
        duration_s = self._clock() - started
        is_late = bool(answer.texts) and 0 < summary_request.deadline_s < 2 * duration_s
        if answer.is_partial and not is_late:
            answer = await self._ask_for_half(answer, ask_for_size, tokens)
        if not answer.texts and text_count == 1:
            raise SummaryError("garbage")
        return answer.texts

    async def _ask_for_half(
        self,
        first_answer: CheckedAnswer,
        ask_for_size: Callable[[int], Awaitable[CheckedAnswer]],
        tokens: int,
    ) -> CheckedAnswer:
        """Asks for half of `tokens`. Returns the new answer if it has texts, else the first answer.

        Raises:
            SummaryError: Neither answer can be used.
        """
        try:
            second = await ask_for_size(max(1, tokens // 2))
        except SummaryError:
            if not first_answer.texts:
                raise
            return first_answer
        if not (second.texts or first_answer.texts):
            raise SummaryError("truncated")
        return second if second.texts else first_answer

    async def _summarize_via_transcript(
        self, summary_request: SummaryRequest, route: SummaryRoute
    ) -> tuple[str, ...]:
        """Requests the texts from one model. If a call is too long, tries once more with shorter calls."""
        with self._client.admit_calls(summary_request.account, route.url, route.model):
            try:
                return await self._summarize_groups(
                    route_summary_request(summary_request, route, route.window),
                    summary_request.groups,
                    summary_request.shape,
                )
            except SummaryError as failed:
                if failed.reason != "overflow":
                    raise
                window = int(min(failed.limit or route.window, route.window) * OVERFLOW_SHARE)
            return await self._summarize_groups(
                route_summary_request(summary_request, route, window),
                summary_request.groups,
                summary_request.shape,
            )

    async def _summarize_groups(
        self, model_call: RoutedSummaryRequest, groups: tuple[Group, ...], shape: SummaryShape
    ) -> tuple[str, ...]:
        """Returns a text for each group. Uses one call if all groups fit into it, else several calls."""
        prompt_text = await model_call.build_prompt(groups, shape)
        size = await self._count_call_tokens(model_call, prompt_text)
        if size <= model_call.max_input_tokens:
            texts = await self._call_model(
                model_call, groups, shape, prompt_text, size, can_cut=shape.may_cut
            )
            return texts or await self._summarize_one_by_one(model_call, groups, shape)
        messages = tuple(each for group in groups for each in group)
        characters = await run_in_worker(
            partial(count_shown_characters, messages, shape)
        ) * await self._compute_fitting_share(model_call, size)
        shape = await run_in_worker(partial(shrink_shape_to_fit, messages, shape, MAX_PORTIONS * characters))
        if len(groups) == 1:
            return (await self._split_and_merge(model_call, groups[0], shape, characters),)
        group_texts: list[str] = []
        for half in split_into_halves(groups, shape):
            share = sum(count_shown_characters(each, shape) for each in half) / count_shown_characters(
                messages, shape
            )
            part = replace(model_call, tokens=max(1, int(model_call.tokens * share)))
            group_texts += await self._summarize_groups(part, half, shape)
        return tuple(group_texts)

    async def _summarize_one_by_one(
        self, model_call: RoutedSummaryRequest, groups: tuple[Group, ...], shape: SummaryShape
    ) -> tuple[str, ...]:
        """Requests the text of each group by a separate call, the earliest group first.

        Only the first `MAX_PORTIONS` groups get a call. For the others, the result is an empty text.
        """
        sizes = [count_shown_characters(each, shape) for each in groups]
        first = groups[:MAX_PORTIONS]
        texts: list[str] = []
        for start in range(0, len(first), PORTIONS_AT_ONCE):
            stop = start + PORTIONS_AT_ONCE
            batch = zip(first[start:stop], sizes[start:stop], strict=True)
            parts = [
                (
                    replace(model_call, tokens=max(LEAST_RUN_TOKENS, model_call.tokens * size // sum(sizes))),
                    each,
                )
                for each, size in batch
            ]
            texts += await _gather_texts(self._summarize_group(part, each, shape) for part, each in parts)
        return (*texts, *[""] * (len(groups) - len(texts)))

    async def _summarize_group(
        self, model_call: RoutedSummaryRequest, group: Group, shape: SummaryShape
    ) -> str:
        [text] = await self._summarize_groups(model_call, (group,), shape)
        return text

    async def _split_and_merge(
        self, model_call: RoutedSummaryRequest, group: Group, shape: SummaryShape, characters: float
    ) -> str:
        """Returns one text for a group that is too large for one call.

        Summarises portions of the group by separate calls. One more call merges their summaries.

        Raises:
            SummaryError: `summary-window`: the group needs more than `MAX_PORTIONS` portions.
        """
        cut = await run_in_worker(partial(split_into_portions, group, shape, characters))
        # Portions end between units, so they are not quite full, and there may be more of them than expected.
        # In that case, shorten the messages further.
        if len(cut) > MAX_PORTIONS:
            shape = await run_in_worker(
                partial(shrink_shape_to_fit, group, shape, MAX_PORTIONS * characters / 2)
            )
            cut = await run_in_worker(partial(split_into_portions, group, shape, characters))
        if len(cut) > MAX_PORTIONS:
            raise SummaryError("summary-window")
        if len(cut) == 1:
            return await self._summarize_shrunk_group(model_call, group, shape, can_cut=shape.may_cut)
        tokens = max(
            LEAST_PORTION_TOKENS, min(model_call.tokens, int(model_call.max_input_tokens / 2 / len(cut)))
        )
        smaller = replace(model_call, tokens=min(tokens, model_call.tokens), earlier=())
        parts: list[str] = []
        for start in range(0, len(cut), PORTIONS_AT_ONCE):
            some = cut[start : start + PORTIONS_AT_ONCE]
            parts += await _gather_texts(
                self._summarize_shrunk_group(smaller, each, shape, can_cut=True) for each in some
            )
        records = tuple(
            Message(role="assistant", text=f"Record of part {number} of {len(parts)}:\n{text}")
            for number, text in enumerate(parts, 1)
        )
        whole = replace(shape, message_characters=max(len(each.text) for each in records))
        return await self._summarize_shrunk_group(model_call, records, whole, can_cut=shape.may_cut)

    async def _summarize_shrunk_group(
        self, model_call: RoutedSummaryRequest, group: Group, shape: SummaryShape, *, can_cut: bool
    ) -> str:
        """Returns the text for one group. Shortens the messages in the prompt until the call fits.

        Raises:
            SummaryError: `summary-window`: the call still does not fit after `NARROWINGS` attempts.
        """
        for _ in range(NARROWINGS):
            prompt_text = await model_call.build_prompt((group,), shape)
            size = await self._count_call_tokens(model_call, prompt_text)
            if size <= model_call.max_input_tokens:
                [text] = await self._call_model(
                    model_call, (group,), shape, prompt_text, size, can_cut=can_cut
                )
                return text
            share = await self._compute_fitting_share(model_call, size)
            shape = await run_in_worker(partial(_narrow_shape_to_share, group, shape, share))
        raise SummaryError("summary-window")

    async def _compute_fitting_share(self, model_call: RoutedSummaryRequest, size: int) -> float:
        """Returns the share to which the messages in a prompt of `size` tokens must shrink so that it fits.

        Raises:
            SummaryError: `summary-window`: the prompt would not even fit without any messages.
        """
        fixed = await self._count_call_tokens(
            model_call, await model_call.build_prompt(((),), model_call.summary_request.shape)
        )
        if fixed >= model_call.max_input_tokens:
            raise SummaryError("summary-window")
        return CAREFUL_SHARE * (model_call.max_input_tokens - fixed) / max(1, size - fixed)

    async def _call_model(
        self,
        model_call: RoutedSummaryRequest,
        groups: tuple[Group, ...],
        shape: SummaryShape,
        prompt_text: str,
        size: int,
        *,
        can_cut: bool,
    ) -> tuple[str, ...]:
        """Calls the model with this prompt and returns one text for each group.

        Asks a second time, for shorter texts, if the answer was cut too early. If there are several groups,
        the result is empty if the answer does not mark where each text begins.
        """
        response_parser = partial(
            self._check_answer, model_call.summary_request, model_call.tokens, len(groups), can_cut=can_cut
        )
        tokens = int(size * model_call.summary_request.calibration_ratio) + model_call.answer_tokens

        async def ask_for_size(size_tokens: int) -> CheckedAnswer:
            sized_call = replace(model_call, tokens=size_tokens)
            prompt = (
                prompt_text
                if size_tokens == model_call.tokens
                else await sized_call.build_prompt(groups, shape)
            )
            return await self._client.call_model(
                model_call.build_call(prompt),
                model_call.summary_request.account,
                response_parser,
                tokens=tokens,
            )

        return await self._ask_until_complete(
            model_call.summary_request, ask_for_size, model_call.tokens, len(groups)
        )

    async def _check_answer(
        self,
        summary_request: SummaryRequest,
        tokens: int,
        text_count: int,
        answer: SummaryAnswer,
        *,
        can_cut: bool,
    ) -> CheckedAnswer:
        """Returns the usable texts of an answer.

        Args:
            summary_request: The summary request.
            tokens: The size that was asked for.
            text_count: Number of texts that are wanted.
            answer: The answer of the model.
            can_cut: Whether to cut a text that is too long, instead of refusing it.

        Raises:
            SummaryError: The answer cannot be used. If its only fault is that it was cut off, or that several
                texts cannot be separated, the result has no texts instead.
        """
        characters = len(answer.text)
        if (
            characters > MAX_CHARACTERS_A_TOKEN * summary_request.shape.compute_max_tokens(tokens)
            and not can_cut
        ):
            raise SummaryError("longer")
        size = (
            await self._count_tokens(summary_request, Message(role="assistant", text=answer.text))
            if can_cut
            else 0
        )
        try:
            valid_text = validate_summary(
                answer.text,
                answer.finish_reason,
                called_tools=answer.called_tools,
                refused=answer.refused,
                max_characters=characters * tokens // max(tokens, size) if can_cut else None,
            )
            texts = split_run_texts(valid_text, text_count)
        except SummaryError as failed:
            if text_count > 1 and failed.reason in {"garbage", "truncated"}:
                return CheckedAnswer(())
            if failed.reason == "truncated":
                return CheckedAnswer((), is_partial=True)
            raise
        sections = () if can_cut or text_count > 1 else summary_request.shape.sections
        if not sections:
            return CheckedAnswer(texts)
        is_cut = is_unfinished(answer.finish_reason)
        text = repair_sections(texts[0], sections, is_cut=is_cut)
        is_partial = is_cut and not (text and has_last_section(texts[0], sections))
        return CheckedAnswer((text,) if text else (), is_partial)

    async def _count_call_tokens(self, model_call: RoutedSummaryRequest, prompt_text: str) -> int:
        """Counts the tokens of a transcript call."""
        system = Message(role="system", text=model_call.summary_request.instructions)
        return await self._count_tokens(
            model_call.summary_request, system, Message(role="user", text=prompt_text)
        )

    async def _count_tokens(self, summary_request: SummaryRequest, *messages: Message) -> int:
        return sum(
            each.tokens
            for each in await self._reader.add_token_counts(messages, summary_request.counting_options)
        )


async def _gather_texts(calls: Iterable[Coroutine[object, object, str]]) -> list[str]:
    """Waits for all calls and returns their texts. If a call fails, raises its error after all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    failures = (each for each in results if isinstance(each, BaseException))
    failed = next(failures, None)
    if failed is not None:
        raise failed
    return [each for each in results if isinstance(each, str)]


def _narrow_shape_to_share(group: Group, shape: SummaryShape, share: float) -> SummaryShape:
    """Returns a shape that shows about `share` of the characters that the given shape shows of a group."""
    return shrink_shape_to_fit(group, shape, count_shown_characters(group, shape) * share)


def _verify_texts(summary_request: SummaryRequest, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Removes statements that the groups do not support, and corrects the states of user requests."""
    return tuple(
        verify_summary(
            text,
            sources=(*summary_request.user_messages, *group),
            earlier_summaries=summary_request.earlier,
            language=summary_request.language,
            states=summary_request.states,
            max_characters=summary_request.max_characters // len(summary_request.groups),
        )
        for text, group in zip(texts, summary_request.groups, strict=True)
    )
