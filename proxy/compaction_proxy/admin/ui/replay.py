"""The playground: what each strategy would send and cost for a conversation, tried without a provider."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from compaction_proxy.admin.ui import charts, readings
from compaction_proxy.admin.ui.actions import form, one
from compaction_proxy.admin.ui.api import Api, Refused
from compaction_proxy.admin.ui.shown import Outcome, Row
from compaction_proxy.admin.ui.templates import Pages
from compaction_proxy.core.errors import Unreadable
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.wires.json.slices import members

# What is pasted arrives with each sign of JSON as three bytes.
MAX_PASTED_BYTES = 8 * 1024 * 1024
_MAX_FORM_BYTES = 3 * MAX_PASTED_BYTES
TOO_LARGE = (
    f"The transcript is larger than {MAX_PASTED_BYTES:,} bytes; the command `replay` takes longer ones."
)
_TOO_LARGE = 413
_OFFERED_CONVERSATIONS = 50
_TAKEN = ("messages", "tools", "model")


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
            told = await self.api.post(request, "replay", body=await asyncio.to_thread(_question, wanted))
        except Refused as error:
            if error.status == _TOO_LARGE:  # nobody wants the megabytes back
                raise
            return await self._page(request, wanted, Tried(), error)
        outcomes = readings.outcomes(told.get("results"))
        return await self._page(request, wanted, Tried(outcomes, charts.strategies(outcomes)))

    async def _page(
        self, request: Request, wanted: Wanted, tried: Tried, error: Refused | None = None
    ) -> Response:
        told = await self.api.stored(request, "conversations", limit=_OFFERED_CONVERSATIONS)
        return await self.pages.page(
            "playground.html",
            error.status if error else 200,
            at="playground",
            wanted=wanted,
            tried=tried,
            strategies=tuple(STRATEGIES),
            dashes=charts.DASHES,
            conversations=readings.rows(Row, told.get("conversations")) if told else (),
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


def _question(wanted: Wanted) -> bytes:
    """What the API is asked. A transcript is not decoded for it: it may have megabytes.

    Raises:
        Refused: 413, the transcript is too large; 422, there is neither one that can be read nor a
            conversation.
    """
    small: dict[str, object] = {
        "strategies": list(wanted.strategies),
        "trigger_tokens": wanted.trigger or None,
        "window": wanted.window or None,
    }
    if wanted.transcript:
        parts = _transcript(wanted.transcript.encode("utf-8", "replace"))
    elif wanted.conversation:
        parts = {"conversation": json.dumps(wanted.conversation).encode()}
    else:
        raise Refused(422, "Paste a transcript, or choose a conversation.")
    if wanted.model:
        small["model"] = wanted.model
    parts |= {name: json.dumps(value).encode() for name, value in small.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in parts.items()) + b"}"


def _transcript(text: bytes) -> dict[str, bytes]:
    """The messages, and what else matters where a whole request was pasted; each as it stands there."""
    if len(text) > MAX_PASTED_BYTES:
        raise Refused(_TOO_LARGE, TOO_LARGE)
    if text.startswith(b"["):
        return {"messages": text}
    try:
        found = members(text)
    except (Unreadable, RecursionError) as error:
        raise Refused(422, "The transcript is no JSON.") from error
    if "messages" not in found:
        raise Refused(422, "The transcript is neither a list of messages nor a request with messages.")
    return {name: text[found[name].start : found[name].stop] for name in _TAKEN if name in found}
