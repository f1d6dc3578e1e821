"""Checks whether the upstream answers and accepts the key, and whether a suitable summary model exists."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx

from compaction_proxy.cli.doctor.command import ERROR, NOTE, OK, WARNING, Finding
from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.core.errors import SummaryError, UpstreamError
from compaction_proxy.core.summary.call import SummaryCall
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.gateway.client.proxies import read_environment_proxies
from compaction_proxy.gateway.summary_routes import CHEAP_MODELS
from compaction_proxy.providers.summary_transport import HttpSummaryModel
from compaction_proxy.providers.windows import FALLBACK_WINDOW, find_shipped_window

DEADLINE_S = 10.0
# If the clocks of this machine and of the upstream differ by more seconds than this, there is a warning. The
# proxy may then misjudge whether certificates are valid and whether stored records have expired.
MAX_CLOCK_SKEW_S = 60.0
SMALL_WINDOW_TOKENS = 16_384
PROBE_TOKENS = 16
# Reading of a body stops after this many bytes. It is large because a list of models may be long.
MAX_BODY_BYTES = 4 * 1_048_576
_UNAUTHORIZED = (401, 403)
_UNREACHABLE, _LATE = 502, 504


async def check_upstream(config: Config, *, probe: bool) -> AsyncIterator[Finding]:
    """Checks the upstream and the providers of the summary models.

    Args:
        config: The configuration.
        probe: Whether to ask each summary model for one word. The provider may charge a little for it.
    """
    transport = EngineTransport(NativeEngine(proxies=read_environment_proxies()))
    try:
        key = config.upstream.api_key.get_secret_value()
        names: frozenset[str] = frozenset()
        try:
            answer, names = await _fetch_models(transport, config.upstream.base_url, key)
        except UpstreamError as error:
            what = f"{config.upstream.base_url}: {error}"
            yield Finding(ERROR, "upstream", what, "correct upstream.base_url, or start what is there")
        else:
            for each in _check_model_list(config, key, answer, names):
                yield each
            if await _is_compaction_proxy(transport, config.upstream.base_url):
                what = "a compaction-proxy answers there, perhaps this very one"
                yield Finding(WARNING, "upstream", what, "name the provider itself in upstream.base_url")
        async for each in _check_summary_models(config, transport, names, probe=probe):
            yield each
    finally:
        await transport.aclose()


async def _send_probe(
    transport: EngineTransport, url: str, headers: Mapping[str, str]
) -> tuple[httpx.Response, bytes]:
    """Sends a GET request and returns the response and its body, which is cut to `MAX_BODY_BYTES`.

    Redirects are not followed, so that the key is never sent to another server.

    Raises:
        UpstreamError: The provider did not answer (502), or not in time (504). The message names the cause.
    """
    fields = {"accept": "application/json", "accept-encoding": "identity", **headers}
    # The client is not closed, because it would close the transport, which belongs to the caller.
    client = httpx.AsyncClient(transport=transport, timeout=None)  # noqa: S113 - asyncio.timeout sets the deadline
    body = bytearray()
    try:
        async with asyncio.timeout(DEADLINE_S), client.stream("GET", url, headers=fields) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    break
        return response, bytes(body)
    except TimeoutError:
        raise UpstreamError(_LATE, f"no answer in {DEADLINE_S:g} s", "upstream_timeout") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        cause = f"{type(error).__name__}: {str(error) or type(error).__name__}"
        raise UpstreamError(_UNREACHABLE, cause, "upstream_unreachable") from None


async def _fetch_models(
    transport: EngineTransport, base_url: str, key: str
) -> tuple[httpx.Response, frozenset[str]]:
    """Returns the answer to `GET /models`, and the ids in it: none if it is no list of models."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer, body = await _send_probe(transport, f"{base_url.rstrip('/')}/models", headers)
    try:
        rows = json.loads(body)["data"]
        return answer, frozenset(each["id"] for each in rows if isinstance(each["id"], str))
    except (ValueError, LookupError, TypeError, RecursionError):
        return answer, frozenset()


def _check_model_list(
    config: Config, key: str, answer: httpx.Response, names: frozenset[str]
) -> Iterator[Finding]:
    """Yields findings about the upstream, its key and its clock, from its answer to `GET /models`."""
    base_url, status = config.upstream.base_url, answer.status_code
    if status in _UNAUTHORIZED and key:
        yield Finding(
            ERROR, "upstream", f"{base_url}: refuses upstream.api_key ({status})", "set a valid key"
        )
    elif status in _UNAUTHORIZED:
        yield Finding(OK, "upstream", f"{base_url}: answers, and wants the key that each client brings")
    elif names:
        yield Finding(
            OK,
            "upstream",
            f"{base_url}: {len(names):,} models in {answer.elapsed.total_seconds() * 1000:.0f} ms",
        )
    elif status >= 500:
        yield Finding(ERROR, "upstream", f"{base_url}: answers {status}", "look at the provider's state")
    else:
        what = f"{base_url}: answers {status}, with no list of models"
        yield Finding(
            WARNING, "upstream", what, "make sure that upstream.base_url ends as clients know it, in /v1"
        )
    skew_s = 0.0
    with suppress(ValueError, TypeError, OverflowError):  # there may be no valid date
        skew_s = abs(parsedate_to_datetime(answer.headers.get("date", "")).timestamp() - time.time())
    if skew_s > MAX_CLOCK_SKEW_S:
        what = f"differs from the upstream's by {skew_s:.0f} s"
        yield Finding(WARNING, "clock", what, "keep it right with NTP")


async def _is_compaction_proxy(transport: EngineTransport, base_url: str) -> bool:
    parts = urlsplit(base_url)
    with suppress(UpstreamError, ValueError, LookupError, TypeError):
        _, body = await _send_probe(transport, f"{parts.scheme}://{parts.netloc}/readyz", {})
        fields = json.loads(body)
        return isinstance(fields, dict) and {"ready", "store", "version"} <= set(fields)
    return False


async def _check_summary_models(
    config: Config, transport: EngineTransport, names: frozenset[str], *, probe: bool
) -> AsyncIterator[Finding]:
    """Checks each configured summary model once. `names` are the model ids that the upstream lists."""
    checked: set[tuple[str, str]] = set()
    for row in config.settings_by_glob:
        base_url = row.settings.summary.base_url or config.upstream.base_url
        model = _resolve_summary_model(row.settings, base_url)
        if (base_url, model) in checked:
            continue
        checked.add((base_url, model))
        if model in {"none", "same"}:
            what = "none: texts are made without a model" if model == "none" else "that of each request"
            yield Finding(OK, "summary model", what)
            continue
        known_names = names
        if row.settings.summary.base_url is not None:
            key = row.settings.summary.api_key.get_secret_value()
            try:
                _, known_names = await _fetch_models(transport, base_url, key)
            except UpstreamError as error:
                what = f"{model} at {base_url}: {error}"
                yield Finding(ERROR, "summary model", what, "correct summary.base_url")
                continue
        yield _check_window(config, model, known_names)
        if probe:
            yield await _probe_summary_model(config, row.settings, transport, base_url, model)


def _resolve_summary_model(settings: ModelSettings, base_url: str) -> str:
    """Returns the name of the summary model for these settings, or `none` or `same`.

    `none` means that no model writes summaries. `same` means that the model of each request writes them.
    """
    shape = resolve_policy(settings).summary
    if settings.summary.model is not None or shape is None:
        return settings.summary.model or "none"
    if shape.model == "same" or shape.form == "aligned":
        return "same"
    return CHEAP_MODELS.get(urlsplit(base_url).hostname or "", "same")


def _check_window(config: Config, model: str, names: frozenset[str]) -> Finding:
    """Checks whether the provider lists the model, and whether the model's context window is large enough."""
    if names and model not in names:
        fix = "name one that the provider has in summary.model"
        return Finding(WARNING, "summary model", f"{model}: not in the provider's list", fix)
    known_window = get_model_settings(config, model).window or find_shipped_window(model)
    window, note = (known_window, "") if known_window else (FALLBACK_WINDOW, ", supposed")
    if window < SMALL_WINDOW_TOKENS:
        what = f"{model}: {window:,} tokens at once, so that a long conversation takes many calls"
        return Finding(WARNING, "summary model", what, "name one with a larger window in summary.model")
    return Finding(OK, "summary model", f"{model}: {window:,} tokens{note}")


async def _probe_summary_model(
    config: Config, settings: ModelSettings, transport: EngineTransport, base_url: str, model: str
) -> Finding:
    """Asks the summary model for one word and checks whether it answers."""
    key = settings.summary.api_key.get_secret_value() or config.upstream.api_key.get_secret_value()
    if not key:
        return Finding(NOTE, "summary probe", f"{model}: not asked, because clients bring the key")
    call = SummaryCall(
        url=f"{base_url.rstrip('/')}/chat/completions",
        headers={"authorization": f"Bearer {key}"},
        model=model,
        system="Answer with one word.",
        prompt="Say ok.",
        max_tokens=PROBE_TOKENS,
        temperature=None,
    )
    try:
        answer = await HttpSummaryModel(transport).request_summary(call)
    except SummaryError as error:
        return Finding(ERROR, "summary probe", f"{model}: {error.reason}", "try another summary.model or key")
    spent = answer.prompt_tokens + answer.completion_tokens
    return Finding(OK, "summary probe", f"{model}: answered, for {spent:,} tokens")
