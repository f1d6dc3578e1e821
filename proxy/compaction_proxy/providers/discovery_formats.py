"""Where servers tell the window of a model, and how: lists of models, and the pages of local servers.

Only what is loaded or served counts. What a model was trained for, or may be loaded with, says nothing of
what this server takes.
"""

import ipaddress
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

_LEAST_TOKENS: Final = 256
_MOST_TOKENS: Final = 100_000_000
_MAX_MODELS: Final = 10_000
# Providers whose lists of models tell no windows; the shipped table knows theirs.
_SILENT: Final = frozenset(
    {"api.openai.com", "api.anthropic.com", "api.deepseek.com", "api.x.ai", "api.perplexity.ai"}
    | {"generativelanguage.googleapis.com", "api.moonshot.ai", "api.z.ai", "api.minimax.io"}
)
_SILENT_DOMAINS: Final = (".azure.com", ".amazonaws.com", ".googleapis.com")
_LOCAL_DOMAINS: Final = (".local", ".internal", ".lan", ".home.arpa", ".localhost")


def model_urls(base_url: str, model: str) -> tuple[str, ...]:
    """Where to ask about a model, in order: the list, then the model alone. Empty: nothing would be told."""
    host = (urlsplit(base_url).hostname or "").lower()
    if not host or host in _SILENT or host.endswith(_SILENT_DOMAINS):
        return ()
    start = f"{base_url.rstrip('/')}/models"
    if not model or ".." in model:  # a name is the client's to choose: it must not lead to another page
        return (start,)
    return (start, f"{start}/{quote(model, safe='/:@', errors='replace')}")


def local_urls(base_url: str) -> tuple[str, ...]:
    """The pages of llama.cpp, LM Studio and Ollama, if the upstream may be one: it is not on the internet."""
    parts = urlsplit(base_url)
    if not _local((parts.hostname or "").lower()):
        return ()
    path = parts.path.rstrip("/").removesuffix("/v1")
    return tuple(
        urlunsplit((parts.scheme, parts.netloc, path + page, "", ""))
        for page in ("/props", "/api/v0/models", "/api/ps")
    )


def _local(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return bool(host) and ("." not in host or host.endswith(_LOCAL_DOMAINS))


def told_window(body: bytes, model: str) -> int | None:
    """The window that an answer from any of these URLs tells, in tokens; the smallest if it tells several."""
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        return None
    found = [window for window in _windows(payload, model) if _possible(window)]
    return min(found, default=None)


def _windows(payload: Any, model: str) -> Iterator[Any]:
    page = _mapping(payload)
    yield _mapping(page.get("default_generation_settings")).get("n_ctx")  # llama.cpp, one slot
    for entry in _entries(page, model):
        yield _mapping(entry.get("meta")).get("n_ctx")  # llama.cpp
        yield entry.get("max_model_len")  # vLLM, SGLang
        yield entry.get("loaded_context_length")  # LM Studio
        yield entry.get("context_window")  # Groq
        yield entry.get("context_length")  # OpenRouter, Together, Fireworks; Ollama: as loaded
        yield _mapping(entry.get("top_provider")).get("context_length")  # OpenRouter


def _entries(page: Mapping[str, Any], model: str) -> list[Mapping[str, Any]]:
    """What a page says about the model: its entry in a list, or the page itself."""
    listed = page.get("data") if "data" in page else page.get("models")
    if isinstance(listed, Mapping):
        return [listed]
    if not isinstance(listed, list):
        return [page]
    entries = [_mapping(entry) for entry in listed[:_MAX_MODELS]]
    named = [entry for entry in entries if model in _names(entry)]
    # A server with one model serves it under any name: llama.cpp does.
    return named or (entries if len(entries) == 1 and "meta" in entries[0] else [])


def _names(entry: Mapping[str, Any]) -> set[str]:
    names = {name for key in ("id", "name", "model") if isinstance(name := entry.get(key), str)}
    # Ollama adds the tag that is meant where none is named.
    return names | {name.removesuffix(":latest") for name in names}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _possible(window: Any) -> bool:
    return type(window) is int and _LEAST_TOKENS <= window <= _MOST_TOKENS
