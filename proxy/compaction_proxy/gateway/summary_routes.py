"""Chooses which models are asked for a summary, at which URLs, with which credentials."""

from collections.abc import Sequence
from types import MappingProxyType
from urllib.parse import urlsplit

from starlette.types import Scope

from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.config.types import parse_origin
from compaction_proxy.core.strategies import Policy
from compaction_proxy.gateway.headers import CREDENTIALS, HOP_HEADER, build_credential_field
from compaction_proxy.gateway.paths import join_upstream_url, replace_deployment
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.providers.windows import get_known_window
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.registry import WIRES
from compaction_proxy.wires.wire import Wire

# A cheap model for summaries, by the provider's host, as of 2026-11. If a provider does not offer the model,
# the proxy asks the model of the client's request instead.
CHEAP_MODELS = MappingProxyType(
    {
        "api.openai.com": "gpt-5.4-mini",
        "api.anthropic.com": "claude-haiku-4-5",
        "api.deepseek.com": "deepseek-chat",
        "api.groq.com": "llama-3.1-8b-instant",
        "api.mistral.ai": "mistral-small-latest",
        "generativelanguage.googleapis.com": "gemini-2.5-flash",
        "openrouter.ai": "openai/gpt-5.4-mini",
    }
)
# Header fields that a provider may need in addition to the credential, to know which account to bill.
_ACCOUNT_HEADERS = frozenset({b"openai-organization", b"openai-project"})
# Header fields that say which version of its API the provider is to use, and which beta features.
_READING_HEADERS = frozenset({b"anthropic-version", b"anthropic-beta"})


def build_credential_headers(upstream: Upstream, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns the header fields with the credential for the proxy's own calls of the upstream.

    The credential is the proxy's key for the upstream if there is one, else the client's own.
    """
    forwarded_names = CREDENTIALS | _ACCOUNT_HEADERS | _READING_HEADERS
    fields = [(key, value) for key, value in headers if key in forwarded_names]
    if upstream.api_key:
        fields = [field for field in fields if field[0] in _READING_HEADERS]
        fields = [*fields, build_credential_field(headers, upstream.api_key, upstream.key_field)]
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in fields}


def build_summary_routes(
    config: Config,
    settings: ModelSettings,
    policy: Policy,
    upstream: Upstream,
    scope: Scope,
    model: str,
    request_wire: Wire = CHAT,
) -> tuple[SummaryRoute, ...]:
    """Returns the routes on which to ask for a summary for this request, in the order in which to try them.

    The result is empty if no model is to be asked, or if there is no credential that may be sent to the
    provider of summaries.

    The credential is `summary.api_key` if that is set, else the proxy's key for the upstream, else the
    client's own. The proxy's key and the client's go only to the origin of the upstream: for any other origin
    the configuration requires `summary.api_key`. If `summary.base_url` is not set, `summary.api_key` and
    `summary.model` are meant for `config.upstream.base_url`. They are then not used at another provider that
    the configuration sets for a wire.

    Args:
        config: The configuration.
        settings: The settings for the request's model.
        policy: The strategy's policy.
        upstream: The upstream of the request.
        scope: The ASGI scope of the request, or a copy with the path that summary calls are to use.
        model: The model of the request.
        request_wire: The wire of summary calls if `summary.base_url` is not set.
    """
    summary, origin = settings.summary, parse_origin(upstream.base_url)
    own_key, own_model = summary.api_key.get_secret_value(), summary.model
    wire = WIRES[summary.wire] if summary.base_url else request_wire
    if summary.base_url:
        if not own_key and parse_origin(summary.base_url) != origin:
            return ()  # the upstream's or client's credential never goes to another origin
    elif parse_origin(config.upstream.base_url) != origin:
        own_key = ""
        own_model = own_model if own_model in {"none", "same"} else None
    if not own_key:
        credentials = build_credential_headers(upstream, scope["headers"])
    elif wire.api_key_header:
        credentials = {wire.api_key_header.decode(): own_key}
    else:
        credentials = {"authorization": f"Bearer {own_key}"}
    headers = {**wire.summary_call_format.headers, **credentials, HOP_HEADER.decode(): upstream.hop_mark}
    return tuple(
        SummaryRoute(
            _build_url(summary.base_url, upstream, scope, name, wire),
            headers,
            name,
            get_model_settings(config, name).window or get_known_window(name),
            wire,
        )
        for name in _choose_models(own_model, policy, summary.base_url or upstream.base_url, model)
    )


def _choose_models(
    configured_model: str | None, policy: Policy, base_url: str, request_model: str
) -> tuple[str, ...]:
    """Returns the models to ask, in order: the one that the configuration names, else the strategy's choice.

    Returns an empty tuple if no model is to be asked.

    Args:
        configured_model: The model that the configuration names, "none" or "same"; None if it names none.
        policy: The strategy's policy.
        base_url: The URL of the provider, which decides the cheap model.
        request_model: The model of the client's request.
    """
    shape = policy.summary
    if configured_model == "none" or shape is None:
        return ()
    if configured_model is None and (shape.model == "same" or shape.form == "aligned"):
        configured_model = "same"
    if configured_model:
        return (request_model if configured_model == "same" else configured_model,)
    cheap_model = CHEAP_MODELS.get(urlsplit(base_url).hostname or "", request_model)
    return tuple(dict.fromkeys((cheap_model, request_model)))


def _build_url(base_url: str | None, upstream: Upstream, scope: Scope, model: str, wire: Wire) -> str:
    """Returns the URL for a summary call: below `base_url` if that is set, else that of the request.

    In the URL of a request to Azure, `model` replaces the model of the request.
    """
    if base_url:
        return base_url.rstrip("/") + wire.summary_call_format.path
    path = replace_deployment(scope["raw_path"], model)
    origin, target = join_upstream_url(upstream.base_url, path, scope["query_string"])
    return origin + target.decode("latin-1")
