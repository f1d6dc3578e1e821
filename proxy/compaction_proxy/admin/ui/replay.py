"""The playground: a page that shows what each strategy would forward for a conversation, and at what cost.

The playground calls no provider.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from compaction_proxy.admin.api.routing import AdminApi
from compaction_proxy.admin.ui import charts
from compaction_proxy.admin.ui.pages import get_field, get_or_none, read_form
from compaction_proxy.admin.ui.templates import Templates, describe_error
from compaction_proxy.core.errors import ProxyError, RequestRefusedError, UnreadableBodyError
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.replay.jobs import ReplayJob, parse_job
from compaction_proxy.replay.provider import JsonObject
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
class PlaygroundRoutes:
    """Handles the requests for the playground page and its form.

    Attributes:
        api: Parts of the admin API. One of them runs the replay.
        templates: Templates of the pages.
    """

    api: AdminApi
    templates: Templates

    async def show_form(self, request: Request) -> Response:
        """Shows the form. The query parameter `conversation` selects a stored conversation."""
        name = request.query_params.get("conversation", "")
        return await self._render_playground(PlaygroundForm(conversation=name))

    async def show_results(self, request: Request) -> Response:
        """Shows the form as it was sent, with the results of the replay."""
        form = _parse_form(await read_form(request, _MAX_FORM_BYTES))
        try:
            results = await self.api.replay_jobs.run_job(await asyncio.to_thread(_build_job, form))
        except ProxyError as error:
            status, message = describe_error(error)
            if status == _TOO_LARGE:  # the form would send megabytes back to the browser
                raise
            return await self._render_playground(form, status=status, trouble=message)
        return await self._render_playground(form, results)

    async def _render_playground(
        self,
        wanted: PlaygroundForm,
        results: Sequence[JsonObject] = (),
        *,
        status: int = 200,
        trouble: str = "",
    ) -> Response:
        return await self.templates.render_page(
            "playground.html",
            status,
            at="playground",
            wanted=wanted,
            results=results,
            chart=charts.build_strategies_chart(results),
            strategies=tuple(STRATEGIES),
            dashes=charts.DASHES,
            conversations=await get_or_none(self.api.queries.list_conversations(_OFFERED_CONVERSATIONS))
            or (),
            trouble=trouble,
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


def _build_job(form: PlaygroundForm) -> ReplayJob:
    """Builds the job to run. Does not decode the transcript, which may have megabytes.

    Raises:
        RequestRefusedError: The transcript is too large (413), or neither messages nor a request (400 or
            422), or there is neither a transcript nor a conversation (422).
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
        raise _build_refusal("Paste a transcript, or choose a conversation.")
    if form.model:
        small["model"] = form.model
    parts |= {name: json.dumps(value).encode() for name, value in small.items()}
    return parse_job(
        b"{%b}" % b",".join(b"%b:%b" % (json.dumps(name).encode(), value) for name, value in parts.items())
    )


def _build_refusal(message: str) -> RequestRefusedError:
    return RequestRefusedError(422, message, "invalid_request")


def _split_transcript(text: bytes) -> dict[str, bytes]:
    """Returns the raw JSON of the messages and, if a whole request was pasted, of its tools and model."""
    if len(text) > MAX_PASTED_BYTES:
        raise RequestRefusedError(_TOO_LARGE, TOO_LARGE, "request_too_large")
    if text.startswith(b"["):
        return {"messages": text}
    try:
        found = find_members(text)
    except (UnreadableBodyError, RecursionError) as error:
        raise _build_refusal("The transcript is no JSON.") from error
    if "messages" not in found:
        raise _build_refusal("The transcript is neither a list of messages nor a request with messages.")
    return {name: text[found[name].start : found[name].stop] for name in _TRANSCRIPT_FIELDS if name in found}
