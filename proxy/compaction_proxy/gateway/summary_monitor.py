"""Watches whether the summary models that the configuration names can be used."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import httpx
import structlog

from compaction_proxy.config.config import Config
from compaction_proxy.config.types import parse_origin
from compaction_proxy.core.errors import ProxyError
from compaction_proxy.core.problem import Problem
from compaction_proxy.core.summary.call import SummaryCall
from compaction_proxy.gateway.provider_models import fetch_model_list
from compaction_proxy.gateway.summary_routes import ConfiguredSummaryModel, list_summary_models
from compaction_proxy.support.log_events import SUMMARY_MODEL_UNUSABLE

# While a summary model cannot be used, the monitor asks its provider again after this many seconds.
RECHECK_INTERVAL_S = 30.0

UNKNOWN_MODEL, KEY_REFUSED, UNREACHABLE = "unknown-model", "key-refused", "unreachable"
# Failures that only a summary call has shown. The provider's list of models does not refute them: it may list
# models that a key may not use, and some providers give it to everybody, whatever the key.
CALL_NOT_FOUND, CALL_REFUSED = "call-not-found", "call-refused"
_ONLY_OF_CALLS = frozenset({CALL_NOT_FOUND, CALL_REFUSED})
_KEY_REFUSED_TEXTS = (
    "The provider of the summary model rejects the API key.",
    "Set {api_key_key} to a key that {base_url} accepts.",
)
# What is wrong, and how to fix it, by the kind of failure.
_TEXTS = {
    UNKNOWN_MODEL: (
        "The provider does not have the summary model.",
        "'{model}' is not among the models of {base_url}. Set {model_key} to another model.",
    ),
    # A wrong base URL is answered like a wrong model, with 404.
    CALL_NOT_FOUND: (
        "The provider does not have the summary model.",
        "{base_url} did not find '{model}': set {model_key} to another model, or correct {url_key}.",
    ),
    KEY_REFUSED: _KEY_REFUSED_TEXTS,
    CALL_REFUSED: _KEY_REFUSED_TEXTS,
    UNREACHABLE: (
        "The provider of the summary model cannot be reached.",
        "Start the server at {base_url}, or correct {url_key}.",
    ),
}
# Maps the reason of a failed summary call to the kind of failure. Other reasons do not show whether the model
# can be used.
_KINDS = {
    "unknown-model": CALL_NOT_FOUND,
    "http-401": CALL_REFUSED,
    "http-403": CALL_REFUSED,
    "unreachable": UNREACHABLE,
}

_log = structlog.get_logger()


class SummaryModelMonitor:
    """Knows which configured summary models cannot be used, and why.

    Watches only models that the configuration names. It does not watch a cheap model that the proxy chooses
    itself, because the request's own model can take its place. The monitor asks a provider for its list of
    models at the start and after each change of the configuration. It also learns from summary calls. While a
    model cannot be used, the monitor asks its provider again from time to time.

    Args:
        transport: Transport to the providers.
        config: The configuration. None watches no model.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, config: Config | None) -> None:
        self._transport = transport
        self._models: tuple[ConfiguredSummaryModel, ...] = ()
        self._failures: dict[ConfiguredSummaryModel, str] = {}
        # Models whose last summary call succeeded. A provider need not list a model that it accepts.
        self._proven: set[ConfiguredSummaryModel] = set()
        self._check: asyncio.Task[None] | None = None
        if config is not None:
            self.set_config(config)

    def set_config(self, config: Config) -> None:
        """Watches the models of a configuration from now on. Sends nothing."""
        self._models = tuple(each for each in list_summary_models(config) if each.is_named)
        self._failures = {model: kind for model, kind in self._failures.items() if model in self._models}
        self._proven.intersection_update(self._models)

    def start_check(self) -> asyncio.Task[None]:
        """Starts to ask the providers of all models, and returns the task that does so."""
        if self._check is not None:
            self._check.cancel()
        self._check = asyncio.create_task(self._check_models(self._models))
        return self._check

    async def recheck_periodically(self) -> None:
        """Asks again the providers of models that cannot be used. Runs until its task is cancelled."""
        while True:
            await asyncio.sleep(RECHECK_INTERVAL_S)
            await self._check_models(tuple(self._failures))

    async def close(self) -> None:
        """Cancels a check that is still running."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.wait((self._check,))

    def record_outcome(self, call: SummaryCall, reason: str) -> None:
        """Learns from a summary call. `reason` says why the call failed; it is empty after a success."""
        kind = _KINDS.get(reason)
        for model in self._models:
            if call.model != model.model or parse_origin(call.url) != parse_origin(model.base_url):
                continue
            if kind == CALL_REFUSED and not model.api_key_key:
                continue  # the client's key was refused
            if not reason:
                self._proven.add(model)
            if kind is not None:
                self._proven.discard(model)
                self._record_failure(model, kind)
            elif not reason or self._failures.get(model) == UNREACHABLE:
                self._failures.pop(model, None)

    def list_problems(self) -> list[Problem]:
        """Returns a problem for each model that cannot be used."""
        return [
            Problem(
                _TEXTS[kind][0],
                _TEXTS[kind][1].format(
                    model=model.model,
                    base_url=model.base_url,
                    model_key=model.model_key,
                    url_key=model.url_key,
                    api_key_key=model.api_key_key,
                ),
            )
            for model, kind in self._failures.items()
        ]

    async def _check_models(self, models: Iterable[ConfiguredSummaryModel]) -> None:
        await asyncio.gather(*map(self._check_model, models))

    async def _check_model(self, model: ConfiguredSummaryModel) -> None:
        listed = None
        with suppress(ProxyError):
            listed = await fetch_model_list(self._transport, model.base_url, model.api_key, model.wire)
        if model not in self._models:  # the configuration has changed meanwhile
            return
        if listed is None:
            self._record_failure(model, UNREACHABLE)
        # A key that may not list models can be valid for summaries, and is answered with 403.
        elif listed.response.status_code == httpx.codes.UNAUTHORIZED and model.api_key:
            self._record_failure(model, KEY_REFUSED)
        elif listed.lacks_model(model.model) and model not in self._proven:
            self._record_failure(model, UNKNOWN_MODEL)
        elif self._failures.get(model) == UNREACHABLE or (
            listed.names and self._failures.get(model) not in _ONLY_OF_CALLS
        ):
            self._failures.pop(model, None)

    def _record_failure(self, model: ConfiguredSummaryModel, kind: str) -> None:
        if self._failures.get(model) != kind:
            self._failures[model] = kind
            _log.warning(SUMMARY_MODEL_UNUSABLE, model=model.model, reason=kind)
