"""The playground: what each strategy would send and cost for a conversation, tried without a provider."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from proxy.admin.ui import charts, readings
from proxy.admin.ui.api import Api, Refused
from proxy.admin.ui.forms import form, one
from proxy.admin.ui.rendering import Pages
from proxy.admin.ui.shown import Outcome, Row
from proxy.core.policy import STRATEGIES

# What is pasted arrives with each sign of JSON as three bytes.
MAX_PASTED_BYTES = 8 * 1024 * 1024
_MAX_FORM_BYTES = 3 * MAX_PASTED_BYTES
_OFFERED_CONVERSATIONS = 50


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a form asks for, as it was filled in.

    Attributes:
        transcript: Messages or a request, as JSON.
        conversation: The id of a stored one, where there is no transcript.
        model: The model to ask; empty: the transcript's own.
        strategies: Names of strategies.
        trigger: T in tokens; 0: the strategies' own.
        window: Of the model, in tokens; 0: as it is known.
    """

    transcript: str = ""
    conversation: str = ""
    model: str = ""
    strategies: tuple[str, ...] = ("anchored",)
    trigger: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of it.

    Attributes:
        outcomes: Of each strategy.
        chart: The same, to draw.
    """

    outcomes: tuple[Outcome, ...] = ()
    chart: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Playground:
    """Answers the page and its form.

    Attributes:
        api: What tries strategies.
        pages: Renders.
    """

    api: Api
    pages: Pages

    async def empty(self, request: Request) -> Response:
        """The form, for a conversation where one is named."""
        name = request.query_params.get("conversation", "")
        return await self._page(request, Wanted(conversation=name), Tried())

    async def tried(self, request: Request) -> Response:
        """The form as it was sent, and what came of it."""
        wanted = _wanted(await form(request, _MAX_FORM_BYTES))
        try:
            told = await self.api.post(request, "replay", told=_question(wanted))
        except Refused as error:
            return await self._page(request, wanted, Tried(), error)
        outcomes = readings.outcomes(told.get("results"))
        return await self._page(request, wanted, Tried(outcomes, charts.strategies(outcomes)))

    async def _page(
        self, request: Request, wanted: Wanted, tried: Tried, error: Refused | None = None
    ) -> Response:
        told = await self.api.get(request, "conversations", limit=_OFFERED_CONVERSATIONS)
        return self.pages.page(
            "playground.html",
            error.status if error else 200,
            at="playground",
            wanted=wanted,
            tried=tried,
            strategies=tuple(STRATEGIES),
            conversations=readings.rows(Row, told.get("conversations")),
            trouble=str(error) if error else "",
        )


def _wanted(fields: Mapping[str, list[str]]) -> Wanted:
    asked = dict(fields)
    return Wanted(
        transcript=one(asked, "transcript").strip(),
        conversation=one(asked, "conversation"),
        model=one(asked, "model").strip(),
        strategies=tuple(each for each in asked.get("strategy", ()) if each in STRATEGIES) or ("anchored",),
        trigger=_whole(one(asked, "trigger")),
        window=_whole(one(asked, "window")),
    )


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0


def _question(wanted: Wanted) -> dict[str, Any]:
    """What the API is asked.

    Raises:
        Refused: 422, there is neither a transcript that can be read nor a conversation.
    """
    asked: dict[str, Any] = {
        "strategies": list(wanted.strategies),
        "trigger_tokens": wanted.trigger or None,
        "window": wanted.window or None,
    }
    if wanted.transcript:
        asked |= _transcript(wanted.transcript)
    elif wanted.conversation:
        asked["conversation"] = wanted.conversation
    else:
        raise Refused(422, "Paste a transcript, or choose a conversation.")
    return asked | ({"model": wanted.model} if wanted.model else {})


def _transcript(text: str) -> dict[str, Any]:
    """Messages, and the model where a whole request was pasted."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "The transcript is no JSON.") from error
    request = {"messages": told} if isinstance(told, list) else told
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise Refused(422, "The transcript is neither a list of messages nor a request with `messages`.")
    return {name: request[name] for name in ("messages", "model", "tools") if name in request}
