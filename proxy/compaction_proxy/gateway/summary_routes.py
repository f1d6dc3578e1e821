"""Whom to ask for a summary, and with whose credentials (DESIGN.md §5.11)."""

from collections.abc import Sequence
from types import MappingProxyType
from urllib.parse import urlsplit

from starlette.types import Scope

from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.config.config import Config, ModelSettings, for_model
from compaction_proxy.config.sections import SummarySection
from compaction_proxy.config.types import origin
from compaction_proxy.core.strategies import Policy
from compaction_proxy.gateway.headers import CREDENTIALS, HOP_HEADER, credential
from compaction_proxy.gateway.paths import join, with_deployment
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.providers.windows import known_window
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.registry import WIRES
from compaction_proxy.wires.wire import Dialect

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


def _credentials(
    config: Config,
    summary: SummarySection,
    upstream: Upstream,
    headers: Sequence[tuple[bytes, bytes]],
    wire: Dialect,
) -> dict[str, str]:
    """The summary model's own key, else ours for the upstream, else the client's.

    The last two never leave for another origin than the upstream's: the configuration sees to it. Nor does
    the first: named without a URL of its own, it is for `upstream.base_url`, and no wire's other provider.
    """
    own = summary.api_key.get_secret_value()
    if not own or _elsewhere(config, summary, upstream):
        return credentials(upstream, headers)
    return {wire.key_field.decode(): own} if wire.key_field else {"authorization": f"Bearer {own}"}


def _elsewhere(config: Config, summary: SummarySection, upstream: Upstream) -> bool:
    """Whether a summary is asked of a wire's own provider, which `summary` does not speak of."""
    return not summary.base_url and origin(upstream.base_url) != origin(config.upstream.base_url)


def credentials(upstream: Upstream, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Our key for the upstream, else the client's own, as header fields of a call of ours to it."""
    wanted = CREDENTIALS | _ACCOUNT_HEADERS | _READING_HEADERS
    shown = [(key, held) for key, held in headers if key in wanted]
    if upstream.api_key:
        shown = [field for field in shown if field[0] in _READING_HEADERS]
        shown = [*shown, credential(headers, upstream.api_key, upstream.key_field)]
    return {key.decode("latin-1"): held.decode("latin-1") for key, held in shown}


def _models(
    asked: str | None, policy: Policy, base_url: str, own: str, *, elsewhere: bool
) -> tuple[str, ...]:
    """Who is asked, in order: whom the configuration names, else whom the strategy wants.

    A model that it names is not known `elsewhere`.
    """
    if elsewhere and asked not in {"none", "same"}:
        asked = None
    shape = policy.summary
    if asked == "none" or shape is None:
        return ()
    if asked == "same" or (asked is None and (shape.model == "same" or shape.form == "aligned")):
        return (own,)
    cheap = CHEAP_MODELS.get(urlsplit(base_url).hostname or "")
    named = asked or cheap or own
    return (named,) if asked or named == own else (named, own)


def _url(base_url: str | None, upstream: Upstream, scope: Scope, model: str, wire: Dialect) -> str:
    """Where a model is asked: at the summary's own provider, else where the client asks for its own."""
    if base_url:
        return base_url.rstrip("/") + wire.asking.path
    path = with_deployment(scope["raw_path"], model)
    place, target = join(upstream.base_url, path, scope["query_string"])
    return place + target.decode("latin-1")


def summary_routes(
    config: Config,
    settings: ModelSettings,
    policy: Policy,
    upstream: Upstream,
    scope: Scope,
    model: str,
    dialect: Dialect = CHAT,
) -> tuple[SummaryRoute, ...]:
    """Whom to ask for a summary of this request, in order; empty: nobody."""
    summary = settings.summary
    base_url = summary.base_url or upstream.base_url
    if not summary.api_key.get_secret_value() and origin(base_url) != origin(upstream.base_url):
        return ()  # a credential never goes to a second origin
    wire = WIRES[summary.wire] if summary.base_url else dialect
    shown = _credentials(config, summary, upstream, scope["headers"], wire)
    headers = {**wire.asking.headers, **shown, HOP_HEADER.decode(): upstream.hop}
    return tuple(
        SummaryRoute(
            _url(summary.base_url, upstream, scope, name, wire),
            headers,
            name,
            for_model(config, name).window or known_window(name),
            wire,
        )
        for name in _models(
            summary.model, policy, base_url, model, elsewhere=_elsewhere(config, summary, upstream)
        )
    )
