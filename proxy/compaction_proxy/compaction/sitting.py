"""A brief, or a portion of one, before one summary model: what fits, and the call that it makes."""

import hashlib
from dataclasses import dataclass
from functools import partial

from compaction_proxy.compaction.chunking import Group
from compaction_proxy.compaction.summary_request import Brief, SummaryRoute
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.core.summary.call import SummaryCall
from compaction_proxy.core.summary.prompt import prompt
from compaction_proxy.support.offload import beside
from compaction_proxy.wires.chat.summary_call import takes_cache_key

# An answer takes at most this share of the summary model's window, whatever was asked for.
ANSWER_SHARE = 0.25
# A call, its answer included, takes at most this share of the window: sizes are estimates.
WINDOW_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Sitting:
    """A brief, or a portion of one, before one model.

    Attributes:
        brief: What is wanted.
        route: Who is asked.
        window: Tokens that the model is believed to take.
        tokens: Size asked for.
        earlier: Texts of earlier rounds that are shown.
    """

    brief: Brief
    route: SummaryRoute
    window: int
    tokens: int
    earlier: tuple[str, ...]

    @property
    def answer_tokens(self) -> int:
        """Tokens that an answer may take, with what the model thinks before it."""
        return self.brief.shape.allowed(self.tokens) + self.route.dialect.asking.allowance(
            self.route.model, None
        )

    @property
    def room(self) -> float:
        """Counted tokens that instructions and prompt may take, less what the estimate may be wrong by."""
        return (WINDOW_SHARE * self.window - self.answer_tokens) / self.brief.ratio

    async def prompt(self, groups: tuple[Group, ...], shape: SummaryShape) -> str:
        """The data of a call, written beside the loop: it may be megabytes."""
        brief = self.brief
        return await beside(
            partial(
                prompt,
                groups,
                shape,
                task=brief.task,
                earlier=self.earlier,
                language=brief.language,
                tokens=self.tokens,
            )
        )

    def call(self, asked: str) -> SummaryCall:
        """The transcript call that a prompt makes."""
        brief, route = self.brief, self.route
        return SummaryCall(
            url=route.url,
            headers=route.headers,
            model=route.model,
            system=brief.instructions,
            prompt=asked,
            max_tokens=brief.shape.allowed(self.tokens),
            temperature=brief.shape.temperature,
            wire=route.dialect.name,
            cache_key=_cache_key(brief) if takes_cache_key(route.url) else "",
        )


def sitting(brief: Brief, route: SummaryRoute, window: int) -> Sitting:
    """A whole brief before one model that is believed to take so many tokens."""
    shape = brief.shape
    most = int(window * ANSWER_SHARE) * shape.tokens // shape.max_tokens
    return Sitting(brief, route, window, max(1, min(brief.tokens, most)), brief.earlier)


def _cache_key(brief: Brief) -> str:
    """Of a strategy and a tenant, so that summary calls and conversations do not share a cache's place."""
    whose = hashlib.sha256(brief.tenant.encode()).hexdigest()[:16]
    return f"compaction-{brief.shape.prompt}-{whose}"
