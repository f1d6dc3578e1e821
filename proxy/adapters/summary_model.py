"""The summary model behind httpx: one chat completion, small and never streamed."""

from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from proxy.dialects import completion
from proxy.dialects.overflow import detect
from proxy.errors import SummaryFailed
from proxy.ports import SummaryAnswer, SummaryCall

# A summary is a few thousand tokens; an answer beyond this is none.
MAX_ANSWER_BYTES = 1_048_576
# Members that a provider may refuse one after the other.
MAX_ATTEMPTS = 3
# Models of which is remembered what their provider refuses. Clients choose models and queries of URLs.
MAX_MODELS = 256


class HttpSummaryModel:
    """`ports.SummaryModel` over HTTP. The deadline is the caller's."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # one tenant's must not reach another
        self._client = httpx.AsyncClient(transport=transport, cookies=no_cookies, timeout=None)  # noqa: S113
        self._refused: dict[tuple[str, str], frozenset[str]] = {}

    async def ask(self, call: SummaryCall) -> SummaryAnswer:
        """One answer; a member that the provider refuses is left out from then on."""
        key = (call.url, call.model)
        for _ in range(MAX_ATTEMPTS):
            refused = self._refused.get(key, frozenset())
            status, body = await self._post(call, completion.request_body(call, refused))
            if status == httpx.codes.OK:
                return completion.answer(body)
            member = completion.refused_member(body) if status == httpx.codes.BAD_REQUEST else None
            if member is None or member in refused:
                break
            if len(self._refused) >= MAX_MODELS:
                self._refused.clear()
            self._refused[key] = refused | {member}
        overflow = detect(status, body)
        if overflow is not None:
            raise SummaryFailed("overflow", limit=overflow.limit)
        unknown = status == httpx.codes.NOT_FOUND or (b"model" in body and b"not_found" in body)
        raise SummaryFailed("unknown-model" if unknown else f"http-{status}")

    async def _post(self, call: SummaryCall, content: bytes) -> tuple[int, bytes]:
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "accept-encoding": "identity",
            **call.headers,
        }
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        try:
            async with self._client.stream("POST", call.url, content=content, headers=fields) as response:
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise SummaryFailed("garbage")
                return response.status_code, bytes(body)
        except httpx.HTTPError as error:
            raise SummaryFailed("unreachable") from error
