"""A summary model that writes at once: extracts of the size that a model would write, the same each time."""

import json
from typing import NamedTuple

from compaction_proxy.core.errors import SummaryError, UnreadableBodyError
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.replay.provider import ProviderPrompt, SimulatedProvider
from compaction_proxy.replay.summarizer import TARGET_TOKENS, summarize_messages
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.summary_call import build_own_members, build_request_body
from compaction_proxy.wires.chat.wire import CHAT


class SummaryCallUsage(NamedTuple):
    """What a summary call took, in tokens."""

    model: str
    prompt: int
    cached: int
    completion: int


class ExtractiveSummaryModel:
    """`ports.SummaryModel` without a model. It writes for one conversation at a time.

    Attributes:
        provider: Whose models are asked: what the conversation has sent it may be in its cache.
        calls: What was asked since `start_conversation`.
    """

    def __init__(self, provider: SimulatedProvider) -> None:
        self.provider = provider
        self.calls: list[SummaryCallUsage] = []

    def start_conversation(self, provider: SimulatedProvider) -> list[SummaryCallUsage]:
        """Write for another conversation; the calls made for it will be in the list that comes back."""
        self.provider, self.calls = provider, []
        return self.calls

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        """The answer.

        Raises:
            SummaryFailed: `garbage`; what is to be asked is no request.
        """
        provider, calls = self.provider, self.calls
        try:
            body = parse_body(build_request_body(call, build_own_members(call)), CHAT)
        except UnreadableBodyError:
            raise SummaryError("garbage") from None
        prompt = ProviderPrompt(call.model, body.prompt_members, body.messages)
        size, cached = provider.count_prompt_tokens(prompt), provider.read_through_cache(prompt)
        most = min(TARGET_TOKENS, body.max_output or TARGET_TOKENS)
        messages = [json.loads(raw) for raw in body.messages]
        text = summarize_messages(messages, most, lambda said: provider.count_text_tokens(said, call.model))
        written = provider.count_text_tokens(text, call.model)
        calls.append(SummaryCallUsage(call.model, size, cached, written))
        return SummaryAnswer(text, "stop", prompt_tokens=size, completion_tokens=written)
