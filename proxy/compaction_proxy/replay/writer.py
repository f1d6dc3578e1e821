"""Simulates a summary model: writes extracts of realistic size. The same input always gives the same text."""

import json
from typing import NamedTuple

from compaction_proxy.core.errors import SummaryError, UnreadableBodyError
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.replay.provider import ProviderPrompt, SimulatedProvider
from compaction_proxy.replay.summarizer import TARGET_TOKENS, summarize_messages
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT, build_own_members, build_request_body


class SummaryCallUsage(NamedTuple):
    """Usage of a summary call, in tokens."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class ExtractiveSummaryModel:
    """Implements the protocol `providers.types.SummaryModel` by rules. Serves one conversation at a time.

    Attributes:
        provider: The simulated provider to which the conversation's requests also go. Its cache may therefore
            already hold the beginning of an aligned call.
        calls: Usage of the calls since `start_conversation`.
    """

    def __init__(self, provider: SimulatedProvider) -> None:
        self.provider = provider
        self.calls: list[SummaryCallUsage] = []

    def start_conversation(self, provider: SimulatedProvider) -> list[SummaryCallUsage]:
        """Switches to another conversation. Returns the list to which the usage of its calls is appended."""
        self.provider, self.calls = provider, []
        return self.calls

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        """Writes a summary.

        Raises:
            SummaryError: The reason is `garbage`: the call cannot be encoded as a request.
        """
        provider, calls = self.provider, self.calls
        try:
            body = parse_body(build_request_body(call, build_own_members(call)), CHAT)
        except UnreadableBodyError:
            raise SummaryError("garbage") from None
        prompt = ProviderPrompt(call.model, body.prompt_members, body.messages)
        size, cached = provider.count_prompt_tokens(prompt), provider.count_and_cache_prompt(prompt)
        most = min(TARGET_TOKENS, body.max_output or TARGET_TOKENS)
        messages = [json.loads(raw) for raw in body.messages]
        text = summarize_messages(messages, most, lambda said: provider.count_text_tokens(said, call.model))
        written = provider.count_text_tokens(text, call.model)
        calls.append(SummaryCallUsage(call.model, size, cached, written))
        return SummaryAnswer(text, "stop", prompt_tokens=size, completion_tokens=written)
