"""The section `upstream`: where requests go, whatever their wire."""

from typing import Annotated, Literal

from pydantic import BaseModel, SecretStr

from compaction_proxy.config.types import STRICT, AutoOrFalse, HttpUrl, Key, Only, Seconds, origin

# The wires by name; the first is the one that `upstream` itself is about.
RESPONSES, MESSAGES = "responses", "messages"
WIRES = ("chat", RESPONSES, MESSAGES)
OPENAI = "https://api.openai.com"
ANTHROPIC = "https://api.anthropic.com"


def _is_openai(url: str) -> bool:
    return origin(url) == origin(OPENAI)


class WireSection(BaseModel):
    """Where requests of one wire go, if not where all others do."""

    model_config = STRICT
    base_url: HttpUrl | None = None
    """Base URL of the provider for this wire; null: `upstream.base_url`."""
    api_key: Key = SecretStr("")
    """Key sent there in place of the client's; empty: `upstream.api_key` where the origin is the same."""


class WiresSection(BaseModel):
    """Wires that have a provider of their own. Chat completions go to `upstream.base_url`."""

    model_config = STRICT
    responses: WireSection = WireSection()
    """Requests to `…/responses`."""
    messages: WireSection = WireSection()
    """Requests to `…/v1/messages`, and all with `anthropic-version`; to Anthropic where OpenAI has no key."""


class UpstreamSection(BaseModel):
    """Where requests go."""

    model_config = STRICT
    base_url: HttpUrl = "https://api.openai.com/v1"
    """Base URL of the provider; the client's path is appended, a shared `/v1` is taken once."""
    api_key: Key = SecretStr("")
    """Key sent upstream in place of the client's; empty: the client's own passes through."""
    engine: Literal["native", "aiohttp"] = "native"
    """HTTP client that carries requests: `native`, our own, or `aiohttp`; for comparing, both do the same."""
    timeout_s: Seconds = 600
    """Longest silence of the upstream, in seconds."""
    stream_usage: Annotated[str, Only("observe")] = "observe"
    """Whether `usage` on streams is only observed."""
    lower_max_tokens: AutoOrFalse = "auto"
    """`auto`: `max_tokens` is lowered where the upstream refuses its sum with the prompt; `false`: never."""
    responses_compact: Literal["auto", "relay", "answer"] = "auto"
    """Who compacts if a client asks: `relay` the upstream, `answer` the proxy, `auto` the one that can."""
    wires: WiresSection = WiresSection()
    """Providers of single wires."""

    def provider(self, wire: str) -> tuple[str, str]:
        """Base URL and key for a wire; a key never goes to another origin than the one it is named for."""
        own = getattr(self.wires, wire, None) or WireSection()
        key = self.api_key.get_secret_value()
        base_url = own.base_url or self.base_url
        named = own.api_key.get_secret_value()
        if own.base_url is None and wire == MESSAGES and (named or not key) and _is_openai(base_url):
            base_url = ANTHROPIC  # OpenAI does not speak this wire: what key is shown is not for OpenAI
        shared = origin(base_url) == origin(self.base_url)
        return base_url, named or (key if shared else "")
