"""The playground: a page that shows what each strategy would forward for a conversation, and at what cost.

The playground calls no provider.
"""

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

# Largest pasted transcript, in bytes. A form may be three times as large, because its encoding takes three
# bytes for each special character of JSON.
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
    """Values of the playground's form.

    Attributes:
        transcript: Messages or a request, as JSON.
        conversation: Id of a stored conversation. It is used if there is no transcript.
        model: Model; if empty, the model in the transcript.
        strategies: Names of the strategies to compare.
        trigger: T, in tokens; 0 for the T that each strategy has.
        window: Context window of the model, in tokens; 0 for the window that the proxy knows.
    """

    transcript: str = ""
    conversation: str = ""
    model: str = ""
    strategies: tuple[str, ...] = ("anchored",)
    trigger: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class PlaygroundResults:
    """Results of a replay on the playground.

    Attributes:
        outcomes: Result of each strategy.
        chart: Data of the chart that shows the outcomes (`charts.build_strategies_chart`).
    """

    outcomes: tuple[StrategyOutcomeView, ...] = ()
    chart: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class PlaygroundRoutes:
    """Handles the requests for the playground page and its form.

    Attributes:
        api: Client of the admin API, which runs the replay.
        templates: Templates of the pages.
    """

    api: InProcessAdminClient
    templates: Templates

    async def show_form(self, request: Request) -> Response:
        """Shows the form. The query parameter `conversation` selects a stored conversation."""
        name = request.query_params.get("conversation", "")
        return await self._render_playground(request, PlaygroundForm(conversation=name), PlaygroundResults())

    async def show_results(self, request: Request) -> Response:
        """Shows the form as it was sent, with the results of the replay."""
        form = _parse_form(await read_form(request, _MAX_FORM_BYTES))
        try:
            response = await self.api.post(
                request, "replay", body=await asyncio.to_thread(_build_request_body, form)
            )
        except PageError as error:
            if error.status == _TOO_LARGE:  # the form would send megabytes back to the browser
                raise
            return await self._render_playground(request, form, PlaygroundResults(), error)
        outcomes = readings.read_outcomes(response.get("results"))
        return await self._render_playground(
            request, form, PlaygroundResults(outcomes, charts.build_strategies_chart(outcomes))
        )

    async def _render_playground(
        self,
        request: Request,
        wanted: PlaygroundForm,
        tried: PlaygroundResults,
        error: PageError | None = None,
    ) -> Response:
        response = await self.api.get_or_none(request, "conversations", limit=_OFFERED_CONVERSATIONS)
        return await self.templates.render_page(
            "playground.html",
            error.status if error else 200,
            at="playground",
            wanted=wanted,
            tried=tried,
            strategies=tuple(STRATEGIES),
            dashes=charts.DASHES,
            conversations=readings.read_records(ConversationRowView, response.get("conversations"))
            if response
            else (),
            trouble=str(error) if error else "",
        )


def _parse_form(fields: Mapping[str, list[str]]) -> PlaygroundForm:
    values = dict(fields)
    return PlaygroundForm(
        transcript=get_field(values, "transcript").strip(),
        conversation=get_field(values, "conversation"),
        model=get_field(values, "model").strip(),
        strategies=tuple(each for each in values.get("strategy", ()) if each in STRATEGIES) or ("anchored",),
        trigger=_parse_number(get_field(values, "trigger")),
        window=_parse_number(get_field(values, "window")),
    )


def _parse_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0


def _build_request_body(form: PlaygroundForm) -> bytes:
    """Builds the request body for the admin API. Does not decode the transcript, which may have megabytes.

    Raises:
        PageError: The transcript is too large (413), or there is neither a readable transcript nor a
            conversation (422).
    """
    small: dict[str, object] = {
        "strategies": list(form.strategies),
        "trigger_tokens": form.trigger or None,
        "window": form.window or None,
    }
    if form.transcript:
        parts = _split_transcript(form.transcript.encode("utf-8", "replace"))
    elif form.conversation:
        parts = {"conversation": json.dumps(form.conversation).encode()}
    else:
        raise PageError(422, "Paste a transcript, or choose a conversation.")
    if form.model:
        small["model"] = form.model
    parts |= {name: json.dumps(value).encode() for name, value in small.items()}
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in parts.items()) + b"}"


def _split_transcript(text: bytes) -> dict[str, bytes]:
    """Returns the raw JSON of the messages and, if a whole request was pasted, of its tools and model."""
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
