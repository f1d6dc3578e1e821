"""Chooses the models that the proxy asks for a summary, their URLs, and the credentials for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import urlsplit

from starlette.types import Scope

from compaction_proxy.compaction.request_view import resolve_policy
from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.config.config import Config, ModelSettings, format_key_path, get_model_settings
from compaction_proxy.config.types import parse_origin
from compaction_proxy.config.validation import find_effective_key_path
from compaction_proxy.core.strategies import Policy
from compaction_proxy.gateway.headers import CREDENTIALS, HOP_HEADER, build_credential_field
from compaction_proxy.gateway.paths import join_upstream_url, replace_deployment
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.providers.windows import get_known_window
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.registry import WIRES
from compaction_proxy.wires.wire import Wire

# A cheap model for summaries at each provider, by the provider's host (as of 2026-11). If the call of this
# model fails, the proxy asks the model of the client's request instead.
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
# Header fields with which a client selects the version of the provider's API and its beta features.
_READING_HEADERS = frozenset({b"anthropic-version", b"anthropic-beta"})


@dataclass(frozen=True, slots=True)
class ConfiguredSummaryModel:
    """A summary model as the configuration chooses it, and the keys of the configuration that do so.

    Attributes:
        model: Name of the model; `same` for that of each request, or `none` for no model.
        is_named: Whether the configuration names the model, and not the proxy or the request.
        base_url: Base URL of its provider.
        api_key: Key for the provider; empty if clients bring it.
        wire: Name of the wire on which the provider is asked for its models.
        model_key: Key that names the model, such as `summary.model`.
        url_key: Key that sets the base URL.
        api_key_key: Key that sets `api_key`; empty if clients bring the key.
    """

    model: str
    is_named: bool
    base_url: str
    api_key: str = field(repr=False)
    wire: str
    model_key: str
    url_key: str
    api_key_key: str


def list_summary_models(config: Config) -> list[ConfiguredSummaryModel]:
    """Returns the summary models that the configuration chooses, without repetitions.

    There is at most one for each glob of `models`. The choice and the credential are those of
    `build_summary_routes`.
    """
    found = []
    for row in config.settings_by_glob:
        summary = row.settings.summary
        base_url = summary.base_url or config.upstream.base_url
        chosen = _choose_models(summary.model, resolve_policy(row.settings), base_url, "same")
        is_upstream = parse_origin(base_url) == parse_origin(config.upstream.base_url)
        api_key, path = summary.api_key.get_secret_value(), ("summary", "api_key")
        if not api_key and is_upstream:
            api_key, path = config.upstream.api_key.get_secret_value(), ("upstream", "api_key")

        def name_key(*path: str, glob: str = row.glob) -> str:
            return format_key_path(find_effective_key_path(config, glob, path))

        found.append(
            ConfiguredSummaryModel(
                model=chosen[0] if chosen else "none",
                is_named=summary.model not in {None, "same"} and summary.model in chosen,
                base_url=base_url,
                api_key=api_key,
                wire=summary.wire if summary.base_url else CHAT.name,
                model_key=name_key("summary", "model"),
                url_key=name_key("summary", "base_url") if summary.base_url else "upstream.base_url",
                api_key_key=name_key(*path) if api_key else "",
            )
        )
    return list(dict.fromkeys(found))


def build_key_header(wire: Wire, api_key: str) -> dict[str, str]:
    """Returns the header field in which providers of a wire expect the proxy's own key."""
    if wire.api_key_header:
        return {wire.api_key_header.decode(): api_key}
    return {"authorization": f"Bearer {api_key}"}


def build_credential_headers(upstream: Upstream, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns the header fields with a credential, for calls that the proxy itself makes to the upstream.

    The credential is the proxy's key for the upstream if there is one, else the client's own. Fields of the
    client that select an account or an API version are included. With the proxy's key, those that select an
    account are left out.
    """
    forwarded_names = CREDENTIALS | _ACCOUNT_HEADERS | _READING_HEADERS
    fields = [(key, value) for key, value in headers if key in forwarded_names]
    if upstream.api_key:
        fields = [field for field in fields if field[0] in _READING_HEADERS]
        fields = [*fields, build_credential_field(headers, upstream.api_key, upstream.key_field)]
    headers_by_name: dict[str, str] = {}
    for key, value in fields:
        name, text = key.decode("latin-1"), value.decode("latin-1")
        is_list = key in _READING_HEADERS and name in headers_by_name
        headers_by_name[name] = f"{headers_by_name[name]}, {text}" if is_list else text
    return headers_by_name


def build_summary_routes(
    config: Config,
    settings: ModelSettings,
    policy: Policy,
    upstream: Upstream,
    scope: Scope,
    model: str,
    request_wire: Wire = CHAT,
) -> tuple[SummaryRoute, ...]:
    """Returns the routes for a summary call, in the order in which the proxy tries them.

    A route names a model, its URL and the header fields with the credential. The result is empty if the proxy
    must ask no model, or has no credential that it may send to the provider of summaries.

    The credential is `summary.api_key` if that is set, else the proxy's key for the upstream, else the
    client's own. The proxy sends its key for the upstream and the client's credential only to the origin of
    the upstream. For any other origin, `summary.api_key` must be set. If `summary.base_url` is not set,
    `summary.api_key` and `summary.model` belong to `config.upstream.base_url`. If the upstream of the request
    is another provider, they are then ignored, except the values `none` and `same` of `summary.model`.

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
    if own_key:
        credentials = build_key_header(wire, own_key)
    else:
        credentials = build_credential_headers(upstream, scope["headers"])
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
    """Returns the models to ask, in the order in which the proxy tries them.

    If the configuration names a model, the result is this model only. Otherwise the strategy decides: the
    result is the request's model, or the provider's cheap model with the request's model after it. The result
    is empty if the proxy must ask no model.

    Args:
        configured_model: The model that the configuration names; "same" for the request's model, "none" for
            no model, or None if the configuration names none of these.
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
    """Returns the URL for a summary call.

    This is `base_url` with the path of summary calls if `base_url` is set, else the URL to which the client's
    request goes. An Azure URL contains the model of the request, which `model` replaces.
    """
    if base_url:
        return base_url.rstrip("/") + wire.summary_call_format.path
    path = replace_deployment(scope["raw_path"], model)
    origin, target = join_upstream_url(upstream.base_url, path, scope["query_string"])
    return origin + target.decode("latin-1")
