"""Whom to ask for a summary, and with whose credentials (DESIGN.md §5.11)."""

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

# A cheap model for summaries, by the provider's host; where a provider does not know it (any more), the
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
# What a provider may need beside the credential to know whom to bill.
_ACCOUNT_HEADERS = frozenset({b"openai-organization", b"openai-project"})
# What says how the provider is to read a request, and what it allows with this credential.
_READING_HEADERS = frozenset({b"anthropic-version", b"anthropic-beta"})


def _choose_credentials(
    config: Config,
    summary: SummarySection,
    upstream: Upstream,
    headers: Sequence[tuple[bytes, bytes]],
    wire: Wire,
) -> dict[str, str]:
    """The summary model's own key, else ours for the upstream, else the client's.

    The last two never leave for another origin than the upstream's: the configuration sees to it. Nor does
    the first: named without a URL of its own, it is for `upstream.base_url`, and no wire's other provider.
    """
    own = summary.api_key.get_secret_value()
    if not own or _is_other_provider(config, summary, upstream):
        return build_credentials(upstream, headers)
    return {wire.key_field.decode(): own} if wire.key_field else {"authorization": f"Bearer {own}"}


def _is_other_provider(config: Config, summary: SummarySection, upstream: Upstream) -> bool:
    """Whether a summary is asked of a wire's own provider, which `summary` does not speak of."""
    return not summary.base_url and parse_origin(upstream.base_url) != parse_origin(config.upstream.base_url)


def build_credentials(upstream: Upstream, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Our key for the upstream, else the client's own, as header fields of a call of ours to it."""
    wanted = CREDENTIALS | _ACCOUNT_HEADERS | _READING_HEADERS
    shown = [(key, held) for key, held in headers if key in wanted]
    if upstream.api_key:
        shown = [field for field in shown if field[0] in _READING_HEADERS]
        shown = [*shown, build_credential(headers, upstream.api_key, upstream.key_field)]
    return {key.decode("latin-1"): held.decode("latin-1") for key, held in shown}


def _choose_models(
    asked: str | None, policy: Policy, base_url: str, own: str, *, other_provider: bool
) -> tuple[str, ...]:
    """Who is asked, in order: whom the configuration names, else whom the strategy wants.

    A model that it names is not known `other_provider`.
    """
    if other_provider and asked not in {"none", "same"}:
        asked = None
    shape = policy.summary
    if asked == "none" or shape is None:
        return ()
    if asked == "same" or (asked is None and (shape.model == "same" or shape.form == "aligned")):
        return (own,)
    cheap = CHEAP_MODELS.get(urlsplit(base_url).hostname or "")
    named = asked or cheap or own
    return (named,) if asked or named == own else (named, own)


def _build_url(base_url: str | None, upstream: Upstream, scope: Scope, model: str, wire: Wire) -> str:
    """Where a model is asked: at the summary's own provider, else where the client asks for its own."""
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
    """Whom to ask for a summary of this request, in order; empty: nobody."""
    summary = settings.summary
    base_url = summary.base_url or upstream.base_url
    if not summary.api_key.get_secret_value() and parse_origin(base_url) != parse_origin(upstream.base_url):
        return ()  # a credential never goes to a second origin
    wire = WIRES[summary.wire] if summary.base_url else request_wire
    shown = _choose_credentials(config, summary, upstream, scope["headers"], wire)
    headers = {**wire.call_format.headers, **shown, HOP_HEADER.decode(): upstream.hop}
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
