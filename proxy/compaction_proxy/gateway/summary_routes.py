"""Chooses the models to ask for a summary, and the credentials for that (DESIGN.md §5.11)."""

from collections.abc import Sequence
from types import MappingProxyType
from urllib.parse import urlsplit

from starlette.types import Scope

from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.config.sections import SummarySection
from compaction_proxy.config.types import parse_origin
from compaction_proxy.core.strategies import Policy
from compaction_proxy.gateway.headers import CREDENTIALS, HOP_HEADER, build_credential
from compaction_proxy.gateway.paths import join_upstream_url, replace_deployment
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.providers.windows import get_known_window
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.registry import WIRES
from compaction_proxy.wires.wire import Wire

# A cheap model for summaries, by the provider's host. If a provider does not know the model (any more), the
# request's own model is asked instead. Names as of 2026-11.
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
# Fields that a provider may need beside the credential to know which account to bill.
_ACCOUNT_HEADERS = frozenset({b"openai-organization", b"openai-project"})
# Fields that say how the provider is to read a request, and what it allows with this credential.
_READING_HEADERS = frozenset({b"anthropic-version", b"anthropic-beta"})


def _choose_credentials(
    config: Config,
    summary: SummarySection,
    upstream: Upstream,
    headers: Sequence[tuple[bytes, bytes]],
    wire: Wire,
) -> dict[str, str]:
    """Returns the summary model's own key, else ours for the upstream, else the client's, as header fields.

    The last two never go to another origin than the upstream's: the configuration rules this out. Neither
    does the first: without a URL of its own it is meant for `upstream.base_url`, and not for the other
    provider of a wire.
    """
    own = summary.api_key.get_secret_value()
    if not own or _is_other_provider(config, summary, upstream):
        return build_credentials(upstream, headers)
    return {wire.key_field.decode(): own} if wire.key_field else {"authorization": f"Bearer {own}"}


def _is_other_provider(config: Config, summary: SummarySection, upstream: Upstream) -> bool:
    """Returns whether a summary comes from a wire's own provider, which `summary` does not configure."""
    return not summary.base_url and parse_origin(upstream.base_url) != parse_origin(config.upstream.base_url)


def build_credentials(upstream: Upstream, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns our key for the upstream, else the client's own, as header fields for our own calls."""
    forwarded_names = CREDENTIALS | _ACCOUNT_HEADERS | _READING_HEADERS
    fields = [(key, held) for key, held in headers if key in forwarded_names]
    if upstream.api_key:
        fields = [field for field in fields if field[0] in _READING_HEADERS]
        fields = [*fields, build_credential(headers, upstream.api_key, upstream.key_field)]
    return {key.decode("latin-1"): held.decode("latin-1") for key, held in fields}


def _choose_models(
    asked: str | None, policy: Policy, base_url: str, own: str, *, other_provider: bool
) -> tuple[str, ...]:
    """Returns the models to ask, in order: those that the configuration names, else those of the strategy.

    With `other_provider`, a model that the configuration names is ignored, because the provider does not know
    it.
    """
    if other_provider and asked not in {"none", "same"}:
        asked = None
    shape = policy.summary
    if asked == "none" or shape is None:
        return ()
    if asked == "same" or (asked is None and (shape.model == "same" or shape.form == "aligned")):
        return (own,)
    cheap = CHEAP_MODELS.get(urlsplit(base_url).hostname or "")
    first_choice = asked or cheap or own
    return (first_choice,) if asked or first_choice == own else (first_choice, own)


def _build_url(base_url: str | None, upstream: Upstream, scope: Scope, model: str, wire: Wire) -> str:
    """Returns the URL for a model: at the summary's own provider, else where the client's request goes."""
    if base_url:
        return base_url.rstrip("/") + wire.call_format.path
    path = replace_deployment(scope["raw_path"], model)
    place, target = join_upstream_url(upstream.base_url, path, scope["query_string"])
    return place + target.decode("latin-1")


def build_summary_routes(
    config: Config,
    settings: ModelSettings,
    policy: Policy,
    upstream: Upstream,
    scope: Scope,
    model: str,
    request_wire: Wire = CHAT,
) -> tuple[SummaryRoute, ...]:
    """Returns where to ask for a summary of this request, in order. Empty if no model is to be asked."""
    summary = settings.summary
    base_url = summary.base_url or upstream.base_url
    if not summary.api_key.get_secret_value() and parse_origin(base_url) != parse_origin(upstream.base_url):
        return ()  # a credential never goes to a second origin
    wire = WIRES[summary.wire] if summary.base_url else request_wire
    credentials = _choose_credentials(config, summary, upstream, scope["headers"], wire)
    headers = {**wire.call_format.headers, **credentials, HOP_HEADER.decode(): upstream.hop}
    return tuple(
        SummaryRoute(
            _build_url(summary.base_url, upstream, scope, name, wire),
            headers,
            name,
            get_model_settings(config, name).window or get_known_window(name),
            wire,
        )
        for name in _choose_models(
            summary.model,
            policy,
            base_url,
            model,
            other_provider=_is_other_provider(config, summary, upstream),
        )
    )
