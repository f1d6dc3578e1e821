"""A summary model that writes at once: extracts of the size that a model would write, the same each time."""

import json
from typing import NamedTuple

from compaction_proxy.core.errors import SummaryFailed, Unreadable
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.replay.provider import Prompt, Provider
from compaction_proxy.replay.summarizer import TARGET_TOKENS, summarise
from compaction_proxy.wires.body import read
from compaction_proxy.wires.chat.summary_call import own_members, request_body
from compaction_proxy.wires.chat.wire import CHAT


class Call(NamedTuple):
    """What a summary call took, in tokens."""

    model: str
    prompt: int
    cached: int
    completion: int


class Writer:
    """`ports.SummaryModel` without a model. It writes for one conversation at a time.

    Attributes:
        provider: Whose models are asked: what the conversation has sent it may be in its cache.
        calls: What was asked since `begin`.
    """

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.calls: list[Call] = []

    def begin(self, provider: Provider) -> list[Call]:
        """Write for another conversation; the calls made for it will be in the list that comes back."""
        self.provider, self.calls = provider, []
        return self.calls

    async def ask(self, call: SummaryCall) -> SummaryAnswer:
        """The answer.

        Raises:
            SummaryFailed: `garbage`; what is to be asked is no request.
        """
        provider, calls = self.provider, self.calls
        try:
            body = read(request_body(call, own_members(call)), CHAT)
        except Unreadable:
            raise SummaryFailed("garbage") from None
        prompt = Prompt(call.model, body.prompt_members, body.messages)
        size, cached = provider.size(prompt), provider.read(prompt)
        most = min(TARGET_TOKENS, body.max_output or TARGET_TOKENS)
        messages = [json.loads(raw) for raw in body.messages]
        text = summarise(messages, most, lambda said: provider.text_tokens(said, call.model))
        written = provider.text_tokens(text, call.model)
        calls.append(Call(call.model, size, cached, written))
        return SummaryAnswer(text, "stop", prompt_tokens=size, completion_tokens=written)
