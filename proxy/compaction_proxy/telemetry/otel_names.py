"""Names of attributes of spans: the conventions for generative AI (`gen_ai.*`), which still change, and ours.

The conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from collections.abc import Mapping
from typing import Final

OPERATION: Final = "gen_ai.operation.name"
CHAT: Final = "chat"
PROVIDER: Final = "gen_ai.provider.name"
CONVERSATION: Final = "gen_ai.conversation.id"
COMPACTED: Final = "gen_ai.conversation.compacted"
REQUEST_MODEL: Final = "gen_ai.request.model"
FIRST_CHUNK_S: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
METHOD: Final = "http.request.method"
CODE: Final = "http.response.status_code"
ERROR: Final = "error.type"

REQUEST: Final = "compaction_proxy.request.id"
STATUS: Final = "compaction_proxy.status"
STRATEGY: Final = "compaction_proxy.strategy"
ROUND: Final = "compaction_proxy.round"
REASON: Final = "compaction_proxy.reason"
OUTCOME: Final = "compaction_proxy.outcome"
TOKENS_BEFORE: Final = "compaction_proxy.tokens_before"
TOKENS_AFTER: Final = "compaction_proxy.tokens_after"
MESSAGES: Final = "compaction_proxy.messages"
OVERHEAD_S: Final = "compaction_proxy.overhead"
RECALLS: Final = "compaction_proxy.recalls"

# What the conventions call the providers behind these names; any other is called by its own.
PROVIDERS: Final[Mapping[str, str]] = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "api.mistral.ai": "mistral_ai",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.x.ai": "x_ai",
    "api.perplexity.ai": "perplexity",
    "api.cohere.com": "cohere",
    "generativelanguage.googleapis.com": "gcp.gemini",
}
AZURE: Final = ("azure.ai.openai", ".openai.azure.com")


def provider_of(host: str) -> str:
    """What the conventions call the provider at a host."""
    name, ending = AZURE
    return name if host.endswith(ending) else PROVIDERS.get(host, host)
