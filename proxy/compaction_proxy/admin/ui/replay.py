"""The playground: what each strategy would send and cost for a conversation, tried without a provider."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from compaction_proxy.admin.ui import charts, readings
from compaction_proxy.admin.ui.actions import get_field, read_form
from compaction_proxy.admin.ui.api import InProcessAdminClient, PageError
from compaction_proxy.admin.ui.shown import ConversationRowView, StrategyOutcomeView
from compaction_proxy.admin.ui.templates import Templates
from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.wires.json.slices import find_members

# What is pasted arrives with each sign of JSON as three bytes.
MAX_PASTED_BYTES = 8 * 1024 * 1024
_MAX_FORM_BYTES = 3 * MAX_PASTED_BYTES
TOO_LARGE = (
    f"The transcript is larger than {MAX_PASTED_BYTES:,} bytes; the command `replay` takes longer ones."
)
_TOO_LARGE = 413
_OFFERED_CONVERSATIONS = 50
_TRANSCRIPT_FIELDS = ("messages", "tools", "model")


@dataclass(frozen=True, slots=True)
class PlaygroundForm:
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
class PlaygroundResults:
    """What came of it.

    Attributes:
        outcomes: Of each strategy.
        chart: The same, to draw.
    """

    outcomes: tuple[StrategyOutcomeView, ...] = ()
    chart: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class PlaygroundRoutes:
    """Answers the page and its form.

    Attributes:
        api: What tries strategies.
        pages: Renders.
    """

    api: InProcessAdminClient
    pages: Templates

    async def show_form(self, request: Request) -> Response:
        """The form, for a conversation where one is named."""
        name = request.query_params.get("conversation", "")
        return await self._render_playground(request, PlaygroundForm(conversation=name), PlaygroundResults())

    async def show_results(self, request: Request) -> Response:
        """The form as it was sent, and what came of it."""
        wanted = _parse_form(await read_form(request, _MAX_FORM_BYTES))
        try:
            told = await self.api.post(
                request, "replay", body=await asyncio.to_thread(_build_request_body, wanted)
            )
        except PageError as error:
            if error.status == _TOO_LARGE:  # nobody wants the megabytes back
                raise
            return await self._render_playground(request, wanted, PlaygroundResults(), error)
        outcomes = readings.read_outcomes(told.get("results"))
        return await self._render_playground(
            request, wanted, PlaygroundResults(outcomes, charts.build_strategies_chart(outcomes))
        )

    async def _render_playground(
        self,
        request: Request,
        wanted: PlaygroundForm,
        tried: PlaygroundResults,
        error: PageError | None = None,
    ) -> Response:
        told = await self.api.get_or_none(request, "conversations", limit=_OFFERED_CONVERSATIONS)
        return await self.pages.render_page(
            "playground.html",
            error.status if error else 200,
            at="playground",
            wanted=wanted,
            tried=tried,
            strategies=tuple(STRATEGIES),
            dashes=charts.DASHES,
            conversations=readings.read_records(ConversationRowView, told.get("conversations"))
            if told
            else (),
            trouble=str(error) if error else "",
        )


def _parse_form(fields: Mapping[str, list[str]]) -> PlaygroundForm:
    asked = dict(fields)
    return PlaygroundForm(
        transcript=get_field(asked, "transcript").strip(),
        conversation=get_field(asked, "conversation"),
        model=get_field(asked, "model").strip(),
        strategies=tuple(each for each in asked.get("strategy", ()) if each in STRATEGIES) or ("anchored",),
        trigger=_parse_number(get_field(asked, "trigger")),
        window=_parse_number(get_field(asked, "window")),
    )


def _parse_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0


def _build_request_body(wanted: PlaygroundForm) -> bytes:
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
        parts = _split_transcript(wanted.transcript.encode("utf-8", "replace"))
    elif wanted.conversation:
        parts = {"conversation": json.dumps(wanted.conversation).encode()}
    else:
        raise PageError(422, "Paste a transcript, or choose a conversation.")
    if wanted.model:
        small["model"] = wanted.model
    parts |= {name: json.dumps(value).encode() for name, value in small.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in parts.items()) + b"}"


def _split_transcript(text: bytes) -> dict[str, bytes]:
    """The messages, and what else matters where a whole request was pasted; each as it stands there."""
    if len(text) > MAX_PASTED_BYTES:
        raise PageError(_TOO_LARGE, TOO_LARGE)
    if text.startswith(b"["):
        return {"messages": text}
    try:
        found = find_members(text)
    except (UnreadableBodyError, RecursionError) as error:
        raise PageError(422, "The transcript is no JSON.") from error
    if "messages" not in found:
        raise PageError(422, "The transcript is neither a list of messages nor a request with messages.")
    return {name: text[found[name].start : found[name].stop] for name in _TRANSCRIPT_FIELDS if name in found}
