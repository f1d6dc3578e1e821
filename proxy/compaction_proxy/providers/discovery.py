"""Asks an upstream for a model's context window over HTTP, with limits on time and bytes.

If the upstream cannot be reached, or its responses have no known format, the result is None. Errors of the
network and errors in the upstream's responses raise no exception.
"""

import asyncio
import ipaddress
import json
from collections.abc import Iterator, Mapping, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

import httpx

from compaction_proxy import __version__

# The proxy calls itself this in requests of its own, which no client has sent.
USER_AGENT: Final = f"compaction-proxy/{__version__}"
_LEAST_TOKENS: Final = 256
_MOST_TOKENS: Final = 100_000_000
_MAX_MODELS: Final = 10_000
# Hosts of providers whose lists of models contain no context windows. The proxy does not ask these hosts. It
# takes the context windows of their models from the shipped table (`windows.WINDOWS`).
_SILENT: Final = frozenset(
    {"api.openai.com", "api.anthropic.com", "api.deepseek.com", "api.x.ai", "api.perplexity.ai"}
    | {"generativelanguage.googleapis.com", "api.moonshot.ai", "api.z.ai", "api.minimax.io"}
)
_SILENT_DOMAINS: Final = (".azure.com", ".amazonaws.com", ".googleapis.com")
_LOCAL_DOMAINS: Final = (".local", ".internal", ".lan", ".home.arpa", ".localhost")


def build_model_urls(base_url: str, model: str) -> tuple[str, ...]:
    """Returns the URLs whose responses may contain the context window of a model.

    The first URL is that of the list of models, and the second that of the model's own page. Returns only the
    first if `model` is empty or contains `..`. Returns an empty tuple if `base_url` has no host, or a host
    whose responses contain no context windows (`_SILENT`, `_SILENT_DOMAINS`).
    """
    host = (urlsplit(base_url).hostname or "").lower()
    if not host or host in _SILENT or host.endswith(_SILENT_DOMAINS):
        return ()
    start = f"{base_url.rstrip('/')}/models"
    if not model or ".." in model:  # clients choose the name, and `..` in it would lead to another page
        return (start,)
    return (start, f"{start}/{quote(model, safe='/:@', errors='replace')}")


def build_local_urls(base_url: str) -> tuple[str, ...]:
    """Returns the URLs whose responses contain the context windows of llama.cpp, LM Studio and Ollama.

    Returns an empty tuple if the upstream is not on a local network, because these three servers usually run
    on one.
    """
    parts = urlsplit(base_url)
    if not _is_local((parts.hostname or "").lower()):
        return ()
    path = parts.path.rstrip("/").removesuffix("/v1")
    return tuple(
        urlunsplit((parts.scheme, parts.netloc, path + page, "", ""))
        for page in ("/props", "/api/v0/models", "/api/ps")
    )


def _is_local(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return bool(host) and ("." not in host or host.endswith(_LOCAL_DOMAINS))


def parse_window(body: bytes, model: str) -> int | None:
    """Returns the smallest context window that a response contains for a model, in tokens.

    Ignores values that are not integers, or that are below 256 or above 100 million. Returns None if there is
    no other value, or if `body` is not JSON.
    """
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        return None
    found = _iter_windows(payload, model)
    possible = [each for each in found if type(each) is int and _LEAST_TOKENS <= each <= _MOST_TOKENS]
    return min(possible, default=None)


def _iter_windows(payload: Any, model: str) -> Iterator[Any]:
    page = _as_mapping(payload)
    yield _as_mapping(page.get("default_generation_settings")).get("n_ctx")  # llama.cpp: window of one slot
    for entry in _find_entries(page, model):
        yield _as_mapping(entry.get("meta")).get("n_ctx")  # llama.cpp
        yield entry.get("max_model_len")  # vLLM, SGLang
        yield entry.get("loaded_context_length")  # LM Studio
        yield entry.get("context_window")  # Groq
        yield entry.get("context_length")  # OpenRouter, Together, Fireworks; Ollama, as loaded
        yield _as_mapping(entry.get("top_provider")).get("context_length")  # OpenRouter


def _find_entries(page: Mapping[str, Any], model: str) -> list[Mapping[str, Any]]:
    """Returns the parts of a response that describe the model.

    Looks for them in the member `data`, or in `models` if there is no `data`. If this member is a list of
    models, returns its entries with the model's name. If it is an object, returns this object, which
    describes a single model. Otherwise returns the whole response, because it may itself be the description.
    """
    listed = page.get("data") if "data" in page else page.get("models")
    if isinstance(listed, Mapping):
        return [listed]
    if not isinstance(listed, list):
        return [page]
    entries = [_as_mapping(entry) for entry in listed[:_MAX_MODELS]]
    named = [entry for entry in entries if model in _get_names(entry)]
    # The member `meta` shows that the server is llama.cpp, which accepts any name for its only model.
    return named or (entries if len(entries) == 1 and "meta" in entries[0] else [])


def _get_names(entry: Mapping[str, Any]) -> set[str]:
    names = {name for key in ("id", "name", "model") if isinstance(name := entry.get(key), str)}
    # Ollama lists a model as `name:latest`, although clients request it as `name`.
    return names | {name.removesuffix(":latest") for name in names}


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# Maximum bytes of a response. The proxy ignores a larger response and requests the next URL. For example, if
# the list of models is too large, the proxy requests the model's own page.
MAX_BODY_BYTES = 1_048_576
# Time limit for one call of `discover_window`, in seconds. The call may send several requests. At the limit,
# it stops, and returns the smallest context window that it has found by then.
DEADLINE_S = 3.0


class HttpWindowDiscovery:
    """Implements `providers.types.WindowDiscovery` over HTTP.

    Follows no redirects, because the request headers contain the credential for the upstream, and no other
    host may get this credential.

    Args:
        transport: Transport to the upstream.
        deadline_s: Time limit for one call of `discover_window`, in seconds.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, deadline_s: float = DEADLINE_S) -> None:
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # cookies must not cross tenants
        self._client = httpx.AsyncClient(transport=transport, cookies=no_cookies, timeout=None)  # noqa: S113
        self._deadline_s = deadline_s

    async def discover_window(self, base_url: str, headers: Mapping[str, str], model: str) -> int | None:
        """Asks the upstream for a model's context window. Returns it in tokens.

        Returns None if the upstream does not give it within the time limit. If the URLs of `build_model_urls`
        and those of `build_local_urls` give different numbers, returns the smaller.

        Args:
            base_url: Base URL of the upstream, such as `https://openrouter.ai/api/v1`.
            headers: Headers to send, with the credential for the upstream.
            model: Name of the model.
        """
        urls = build_model_urls(base_url, model)
        if not urls:
            return None
        windows: list[int] = []
        try:
            async with asyncio.timeout(self._deadline_s):
                windows += await self._find_first_window(urls, headers, model)
                # A local server such as llama.cpp may process several requests in parallel, and then divides
                # its context window between them. Its list of models may give the whole context window. Its
                # page `/props` gives the part for one request. No request may be larger than this part.
                windows += await self._find_first_window(build_local_urls(base_url), headers, model)
        except TimeoutError:
            pass
        return min(windows, default=None)

    async def _find_first_window(
        self, urls: Sequence[str], headers: Mapping[str, str], model: str
    ) -> list[int]:
        """Requests the URLs in their order until a response gives a context window for the model.

        Returns a list that contains only this window, in tokens, or an empty list if no response gives one.
        """
        for url in urls:
            window = await asyncio.to_thread(parse_window, await self._fetch_page(url, headers), model)
            if window is not None:
                return [window]
        return []

    async def _fetch_page(self, url: str, headers: Mapping[str, str]) -> bytes:
        """Requests a URL, and returns the body of the response.

        Returns empty bytes if the request fails, if the status is not 200, or if the body has more than
        `MAX_BODY_BYTES`.
        """
        sent = {
            "accept": "application/json",
            "accept-encoding": "identity",
            "user-agent": USER_AGENT,
            **headers,
        }
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()]
        body = bytearray()
        try:
            async with self._client.stream("GET", url, headers=fields) as response:
                if response.status_code != httpx.codes.OK:
                    return b""
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        return b""
        except (httpx.HTTPError, httpx.InvalidURL):
            return b""
        return bytes(body)
