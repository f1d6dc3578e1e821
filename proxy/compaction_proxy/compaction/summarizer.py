"""Requests summaries: chooses the model, the form and the number of calls, and checks the responses.

A call has one of two forms. In the aligned form, it consists of the conversation itself, followed by the
prompt. This form is used if the caller provides the conversation (`SummaryRequest.aligned`) and the call fits
the model's context window. Otherwise, the call contains a transcript of the messages. A transcript that is
too long for one call is split into portions. Each portion gets its own call, and one more call merges the
summaries of the portions.

One call may request one summary for each of several groups of messages. If the response does not show where
each summary begins, each group gets its own call. If a response was cut off at its output limit, it is
accepted if it contains the last section for which the prompt asks. If it does not, one more call requests a
summary of half the size.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.summary_client import SummaryClient, SummaryEndpoint
from compaction_proxy.compaction.summary_request import (
    AlignedConversation,
    PriceLookup,
    SummaryRequest,
    SummaryRoute,
    count_shown_characters,
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

# If the provider refuses a summary call as too long, the token count of the call was wrong. The next calls
# then fill only this share of the context window.
OVERFLOW_SHARE = 0.7
# If the messages do not fit into a call, their texts are cut after a number of characters. The number of
# tokens per character varies. So the texts are cut until they take only about this share of the available
# tokens.
CAREFUL_SHARE = 0.9
# The proxy rejects a response with more characters than the output limit of the call, in tokens, times this
# number. This does not apply to strategies that cut long summaries.
MAX_CHARACTERS_A_TOKEN = 32
# Limits for summarising a conversation in portions: the largest number of portions (if more are needed, the
# summary fails), the largest number of calls at the same time, and the smallest size, in tokens, that is
# requested for the summary of a portion.
MAX_PORTIONS = 12
PORTIONS_AT_ONCE = 2
LEAST_PORTION_TOKENS = 150
# The smallest size of a summary, in tokens, that is requested if each group of messages gets its own call.
LEAST_RUN_TOKENS = 60
# The messages in a call are shortened until the call fits, in at most this many attempts. After that, the
# summary fails.
NARROWINGS = 6
# If a call in the aligned form (with the conversation itself) fails for one of these reasons, the summary is
# requested again in the transcript form.
_FORM_FAILURES = frozenset({"overflow", "http-400", "http-413", "http-422"})


_Written = TypeVar("_Written")


class CheckedAnswer(NamedTuple):
    """The usable summaries in a model's response.

    Attributes:
        texts: One summary for each group of messages; empty if the response cannot be used.
        is_partial: Whether the response was cut off too early, so that the summary should be requested again
            with a smaller size.
    """

    texts: tuple[str, ...]
    is_partial: bool = False


def lookup_no_price(_model: str, _url: str, _prompt: int, _cached: int, _completion: int) -> None:
    """Returns None as the price of every summary call, because no prices are known."""


class Summarizer:
    """Requests summaries. A process has one instance, which remembers which models have failed or are slow.

    Args:
        model: Sends a single call to a summary model.
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
        """Whether there is a summary model that currently gets no calls because it has failed."""
        return self._client.has_resting_model

    async def write_summary(self, summary_request: SummaryRequest) -> tuple[tuple[str, ...], str]:
        """Returns one summary for each group of messages, and the name of the model that wrote them.

        The method checks the form of the summaries. If the strategy requires it, the method also checks them
        against the messages. The caller enforces the deadline.

        Raises:
            SummaryError: If no usable summary could be written. The reason comes from the model or from one
                of the checks, or it is one of these: `no-model` (there is no summary model), `summary-window`
                (the model's context window is too small), `breaker-open` (the model gets no calls because it
                has failed) and `budget` (the tenant has no calls left).
        """
        for route in summary_request.routes:
            self.price(route.model, route.url, 0, 0, 0)  # starts the lookup, so the price is known in time
        texts, model = await self._summarize_via_routes(summary_request)
        if summary_request.shape.is_verified:
            texts = await run_in_worker(partial(_verify_texts, summary_request, texts))
        return texts, model

    def estimate_call_duration_s(self, summary_request: SummaryRequest) -> float | None:
        """Estimates the duration of a call to the first summary model, in seconds; None if it is unknown."""
        if not summary_request.routes:
            return None
        route = summary_request.routes[0]
        return self._client.estimate_call_duration_s(
            SummaryEndpoint(summary_request.tenant, route.url, route.model)
        )

    async def _summarize_via_routes(self, request: SummaryRequest) -> tuple[tuple[str, ...], str]:
        """Requests the summaries from the first summary model whose name its provider knows.

        If the request has the conversation itself (`request.aligned`), tries the aligned form first. Returns
        the summaries and the name of the model that wrote them.
        """
        if not request.routes:
            raise SummaryError("no-model")
        first_route = request.routes[0]
        if request.aligned is not None and request.aligned.body.model in {"", first_route.model}:
            texts = await self._summarize_via_conversation(request, request.aligned, first_route)
            if texts:
                return texts, first_route.model
        for route in request.routes[:-1]:
            try:
                return await self._summarize_via_transcript(request, route), route.model
            except SummaryError as failed:
                if failed.reason != "unknown-model":
                    raise
        last_route = request.routes[-1]
        return await self._summarize_via_transcript(request, last_route), last_route.model

    async def _summarize_via_conversation(
        self, request: SummaryRequest, aligned: AlignedConversation, route: SummaryRoute
    ) -> tuple[str, ...]:
        """Requests the summaries from the conversation's own model, in the aligned form.

        The call consists of the conversation itself, followed by the prompt. Returns an empty tuple if the
        call does not fit, if the provider refuses the form of the call, or if the response does not show
        where each summary begins.
        """
        conversation = ContinuedConversation(aligned.body.raw, aligned.messages)

        async def build_prompt(size_tokens: int) -> str:
            return build_aligned_prompt(
                request.instructions,
                language=request.language,
                max_tokens=size_tokens,
                run_count=len(request.groups),
            )

        prompt = await build_prompt(request.tokens)
        max_tokens = request.shape.compute_max_tokens(request.tokens)
        uncounted = [each for each in aligned.messages if not each.tokens]
        size = sum(each.tokens for each in aligned.messages)
        size += await self._count_tokens(request, *uncounted, Message(role="user", text=prompt))
        size += await self._reader.count_overhead(aligned.body.prompt_members, request.counting_options)
        thinking = route.wire.summary_call_format.get_thinking_allowance(route.model, conversation)
        tokens = int(size * request.calibration_ratio) + max_tokens + thinking
        if tokens > route.window:
            return ()
        call = SummaryCall(
            url=route.url,
            headers=route.headers,
            model=route.model,
            system="",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=request.shape.temperature,
            wire=route.wire.name,
            conversation=conversation,
        )
        with self._client.admit_calls(request.tenant, route):
            try:
                return await self._ask_until_complete(request, call, build_prompt, tokens)
            except SummaryError as failed:
                if failed.reason not in _FORM_FAILURES:
                    raise
                return ()

    async def _ask_until_complete(
        self,
        request: SummaryRequest,
        call: SummaryCall,
        build_prompt: Callable[[int], Awaitable[str]],
        tokens: int,
    ) -> tuple[str, ...]:
        """Calls the model. If the response was cut off too early, calls it again and requests half the size.

        If the second call fails, or if the deadline leaves no time for it, the summaries in the first
        response are used.

        Args:
            request: The summary request.
            call: The first call.
            build_prompt: Takes a number of tokens, and builds the prompt that requests a summary of this
                size.
            tokens: Largest size of prompt and response of each call together, in tokens.

        Returns:
            One summary for each group of messages. If there are several groups, and the response does not
            show where each summary begins, the result is empty.

        Raises:
            SummaryError: If the first response was cut off, and neither response is usable (reason
                `truncated`). If there is only one group, and the response lacks most of the sections for
                which the prompt asks (reason `garbage`). Other reasons come from `SummaryClient`.
        """
        check_answer = partial(self._check_answer, request)
        started = self._clock()
        answer = await self._client.call_model(call, request, check_answer, tokens=tokens)
        duration_s = self._clock() - started
        is_late = bool(answer.texts) and 0 < request.deadline_s < 2 * duration_s
        if answer.is_partial and not is_late:
            half_call = replace(call, prompt=await build_prompt(max(1, request.tokens // 2)))
            try:
                second = await self._client.call_model(half_call, request, check_answer, tokens=tokens)
            except SummaryError:
                if not answer.texts:
                    raise
                second = answer
            if not (second.texts or answer.texts):
                raise SummaryError("truncated")
            answer = second if second.texts else answer
        if not answer.texts and len(request.groups) == 1:
            raise SummaryError("garbage")
        return answer.texts

    async def _summarize_via_transcript(
        self, request: SummaryRequest, route: SummaryRoute
    ) -> tuple[str, ...]:
        """Requests the summaries from one model, in the transcript form.

        If the provider refuses a call as too long, requests all summaries once more, with shorter calls.
        """
        with self._client.admit_calls(request.tenant, route):
            try:
                return await self._summarize_groups(request.select_route(route))
            except SummaryError as failed:
                if failed.reason != "overflow":
                    raise
                window = int(min(failed.limit or route.window, route.window) * OVERFLOW_SHARE)
            return await self._summarize_groups(request.select_route(replace(route, window=window)))

    async def _summarize_groups(self, request: SummaryRequest) -> tuple[str, ...]:
        """Returns one summary for each group. Makes several calls if the groups do not fit into one call."""
        groups, shape = request.groups, request.shape
        prompt = await request.build_prompt()
        size = await self._count_call_tokens(request, prompt)
        if size <= request.max_input_tokens:
            return await self._call_model(request, prompt, size) or await self._summarize_one_by_one(request)
        messages = tuple(each for group in groups for each in group)
        shown = await run_in_worker(partial(count_shown_characters, messages, shape))
        characters = shown * await self._compute_fitting_share(request, size)
        shape = await run_in_worker(partial(shrink_shape_to_fit, messages, shape, MAX_PORTIONS * characters))
        if len(groups) == 1:
            return (await self._split_and_merge(replace(request, shape=shape), characters),)
        texts: list[str] = []
        for half in split_into_halves(groups, shape):
            half_size = sum(count_shown_characters(each, shape) for each in half)
            tokens = int(request.tokens * (half_size / count_shown_characters(messages, shape)))
            part = replace(request, groups=half, shape=shape, tokens=max(1, tokens))
            texts += await self._summarize_groups(part)
        return tuple(texts)

    async def _summarize_one_by_one(self, request: SummaryRequest) -> tuple[str, ...]:
        """Requests the summary of each group by a separate call, the earliest group first.

        Makes calls only for the first `MAX_PORTIONS` groups. The summaries of the other groups are empty.
        """
        sizes = [count_shown_characters(each, request.shape) for each in request.groups]
        parts = [
            replace(
                request, groups=(group,), tokens=max(LEAST_RUN_TOKENS, request.tokens * size // sum(sizes))
            )
            for group, size in zip(request.groups[:MAX_PORTIONS], sizes, strict=False)
        ]
        texts = await _gather_texts(self._summarize_groups, parts)
        return tuple(text for [text] in texts) + ("",) * (len(sizes) - len(parts))

    async def _split_and_merge(self, request: SummaryRequest, characters: float) -> str:
        """Returns one summary for a group of messages that is too large for one call.

        Splits the group into portions, which are summarised by separate calls. One more call merges these
        summaries. `characters` is the largest size of a portion, in characters of the transcript.

        Raises:
            SummaryError: If the group needs more than `MAX_PORTIONS` portions (reason `summary-window`).
        """
        [group], shape = request.groups, request.shape
        portions = await run_in_worker(partial(split_into_portions, group, shape, characters))
        # A portion consists of whole units, so most portions are smaller than allowed, and there may be more
        # of them than expected. If there are too many, the messages are shortened further.
        if len(portions) > MAX_PORTIONS:
            shape = await run_in_worker(
                partial(shrink_shape_to_fit, group, shape, MAX_PORTIONS * characters / 2)
            )
            portions = await run_in_worker(partial(split_into_portions, group, shape, characters))
        if len(portions) > MAX_PORTIONS:
            raise SummaryError("summary-window")
        if len(portions) == 1:
            return await self._summarize_shrunk_group(replace(request, shape=shape))
        tokens = max(LEAST_PORTION_TOKENS, int(request.max_input_tokens / 2 / len(portions)))
        smaller = replace(
            request, shape=replace(shape, may_cut=True), tokens=min(tokens, request.tokens), earlier=()
        )
        texts = await _gather_texts(
            self._summarize_shrunk_group, [replace(smaller, groups=(each,)) for each in portions]
        )
        records = tuple(
            Message(role="assistant", text=f"Record of part {number} of {len(texts)}:\n{text}")
            for number, text in enumerate(texts, 1)
        )
        whole = replace(shape, message_characters=max(len(each.text) for each in records))
        return await self._summarize_shrunk_group(replace(request, groups=(records,), shape=whole))

    async def _summarize_shrunk_group(self, request: SummaryRequest) -> str:
        """Returns the summary of one group. Shortens the messages in the prompt until the call fits.

        Raises:
            SummaryError: If the call does not fit after `NARROWINGS` attempts (reason `summary-window`).
        """
        for _ in range(NARROWINGS):
            prompt = await request.build_prompt()
            size = await self._count_call_tokens(request, prompt)
            if size <= request.max_input_tokens:
                [text] = await self._call_model(request, prompt, size)
                return text
            share = await self._compute_fitting_share(request, size)
            shape = await run_in_worker(partial(_narrow_shape_to_share, request, share))
            request = replace(request, shape=shape)
        raise SummaryError("summary-window")

    async def _compute_fitting_share(self, request: SummaryRequest, size: int) -> float:
        """Returns which share of the messages' text can stay in the prompt so that the call fits, 0..1.

        `size` is the present size of the call, in tokens, which is too large.

        Raises:
            SummaryError: If the call does not fit even without messages (reason `summary-window`).
        """
        fixed = await self._count_call_tokens(request, await replace(request, groups=((),)).build_prompt())
        if fixed >= request.max_input_tokens:
            raise SummaryError("summary-window")
        return CAREFUL_SHARE * (request.max_input_tokens - fixed) / max(1, size - fixed)

    async def _call_model(self, request: SummaryRequest, prompt: str, size: int) -> tuple[str, ...]:
        """Calls the model with this prompt, and returns one summary for each group.

        If the response was cut off too early, calls the model again and requests shorter summaries. If there
        are several groups, and the response does not show where each summary begins, the result is empty.
        `size` is the number of tokens in the system prompt and the prompt.
        """
        tokens = int(size * request.calibration_ratio) + request.answer_tokens
        return await self._ask_until_complete(
            request,
            request.build_call(prompt),
            lambda size_tokens: replace(request, tokens=size_tokens).build_prompt(),
            tokens,
        )

    async def _check_answer(self, request: SummaryRequest, answer: SummaryAnswer) -> CheckedAnswer:
        """Returns the usable summaries in a response.

        The result has no summaries if the response was cut off and contains too little, if it lacks most of
        the required sections, or if several summaries in it cannot be told apart.

        Raises:
            SummaryError: If the response cannot be used for any other reason.
        """
        shape, tokens, text_count = request.shape, request.tokens, len(request.groups)
        characters, max_characters = len(answer.text), None
        if shape.may_cut:  # a text that is too long is cut, else it is refused
            size = await self._count_tokens(request, Message(role="assistant", text=answer.text))
            max_characters = characters * tokens // max(tokens, size)
        elif characters > MAX_CHARACTERS_A_TOKEN * shape.compute_max_tokens(tokens):
            raise SummaryError("longer")
        try:
            valid_text = validate_summary(
                answer.text,
                answer.finish_reason,
                called_tools=answer.called_tools,
                refused=answer.refused,
                max_characters=max_characters,
            )
            texts = split_run_texts(valid_text, text_count)
        except SummaryError as failed:
            if text_count > 1 and failed.reason in {"garbage", "truncated"}:
                return CheckedAnswer(())
            if failed.reason == "truncated":
                return CheckedAnswer((), is_partial=True)
            raise
        if shape.may_cut or text_count > 1 or not shape.sections:
            return CheckedAnswer(texts)
        is_cut = is_unfinished(answer.finish_reason)
        text = repair_sections(texts[0], shape.sections, is_cut=is_cut)
        is_partial = is_cut and not (text and has_last_section(texts[0], shape.sections))
        return CheckedAnswer((text,) if text else (), is_partial)

    async def _count_call_tokens(self, request: SummaryRequest, prompt: str) -> int:
        """Counts the tokens of the system prompt and the prompt of a call in the transcript form."""
        system = Message(role="system", text=request.instructions)
        return await self._count_tokens(request, system, Message(role="user", text=prompt))

    async def _count_tokens(self, request: SummaryRequest, *messages: Message) -> int:
        counted = await self._reader.add_token_counts(messages, request.counting_options)
        return sum(each.tokens for each in counted)


async def _gather_texts(
    summarize: Callable[[SummaryRequest], Awaitable[_Written]], requests: Sequence[SummaryRequest]
) -> list[_Written]:
    """Runs `summarize` for all requests, at most `PORTIONS_AT_ONCE` at the same time. Returns the results.

    If one call of `summarize` fails, waits for the calls that run at the same time, and then raises the
    error. The remaining calls are not made.
    """
    written: list[_Written] = []
    for start in range(0, len(requests), PORTIONS_AT_ONCE):
        batch = requests[start : start + PORTIONS_AT_ONCE]
        results = await asyncio.gather(*map(summarize, batch), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
            written.append(result)
    return written


def _narrow_shape_to_share(request: SummaryRequest, share: float) -> SummaryShape:
    """Returns a shape with lower size limits for the messages of a request.

    With these limits, the transcript has about `share` times its present number of characters. The request
    must have exactly one group.
    """
    [group] = request.groups
    return shrink_shape_to_fit(group, request.shape, count_shown_characters(group, request.shape) * share)


def _verify_texts(summary_request: SummaryRequest, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Removes from each summary the statements that its sources do not support.

    The sources are the user messages, the summarised messages and the earlier summaries. Also corrects wrong
    states of the user's requests, for example if a summary says that an open request is done. Returns the
    corrected summaries.
    """
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
