"""Calls the summary model over HTTP, on any wire. Requests no stream, and limits the size of responses."""

from collections.abc import Callable
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.support.offload import run_in_worker_if_large
from compaction_proxy.wires.content_coding import IDENTITY, Inflater
from compaction_proxy.wires.context_errors import parse_overflow
from compaction_proxy.wires.registry import WIRES
from compaction_proxy.wires.summary_call import SummaryCallFormat, find_refused_member

# Maximum number of bytes of a decompressed response. A summary has a few thousand tokens, so a larger
# response cannot be a summary, and the call fails.
MAX_ANSWER_BYTES = 1_048_576
# Maximum number of requests that the proxy sends for one summary. A provider may refuse several members of
# the request, or several values of the reasoning effort, but each error may name only one of these. Each
# further request leaves out the member or value that the last error named. If the provider refuses the last
# request too, the call fails.
MAX_ATTEMPTS = 6
# Maximum number of pairs of URL and model whose refused request members stay in memory. When the proxy adds a
# member and there are already this many pairs, it first drops all pairs. The number is limited because
# clients can choose models and the query parts of URLs.
MAX_MODELS = 256
_REFUSALS = frozenset({httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY})


class HttpSummaryModel:
    """Implements `providers.types.SummaryModel` over HTTP. The caller enforces the deadline.

    Args:
        transport: Transport to the providers.
        on_outcome: Called after each call with the call, and the reason of its failure or an empty text.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        on_outcome: Callable[[SummaryCall, str], None] = lambda _call, _reason: None,
    ) -> None:
        self._on_outcome = on_outcome
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # cookies must not cross tenants
        self._client = httpx.AsyncClient(transport=transport, cookies=no_cookies, timeout=None)  # noqa: S113
        self._refused: dict[tuple[str, str], frozenset[str]] = {}

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        """Requests one summary.

        Leaves out the optional request members that the provider has refused for the same URL and model
        before. If the provider refuses a further optional member, sends the request again without it, up to
        `MAX_ATTEMPTS` requests in total.

        Raises:
            SummaryError: If the provider cannot be reached or sends no usable response.
        """
        try:
            answer = await self._request_accepted_form(call)
        except SummaryError as error:
            self._on_outcome(call, error.reason)
            raise
        self._on_outcome(call, "")
        return answer

    async def _request_accepted_form(self, call: SummaryCall) -> SummaryAnswer:
        key, call_format = (call.url, call.model), WIRES[call.wire].summary_call_format
        for _ in range(MAX_ATTEMPTS):
            refused = self._refused.get(key, frozenset())
            own = call_format.build_own_members(call, refused)
            size_bytes = len(call.prompt) + (len(call.conversation.raw_body) if call.conversation else 0)
            build_request = partial(call_format.build_request, call, own)
            content = await run_in_worker_if_large(size_bytes, build_request)
            response, body = await self._post_call(call, content)
            if response.is_success:
                return _parse_answer(body, call_format)
            overflow = parse_overflow(response.status_code, body)
            if overflow is not None:
                raise SummaryError("overflow", limit=overflow.limit_tokens)
            member = find_refused_member(body, own) if response.status_code in _REFUSALS else None
            if member is None:
                break
            self._remember_refused(key, member)
        raise _build_failure(response, body)

    def _remember_refused(self, key: tuple[str, str], member: str) -> None:
        refused = self._refused.get(key, frozenset())  # read again: another call may have added a member
        if len(self._refused) >= MAX_MODELS:
            self._refused.clear()
        self._refused[key] = refused | {member}

    async def _post_call(self, call: SummaryCall, content: bytes) -> tuple[httpx.Response, bytes]:
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "accept-encoding": "identity",
            **call.headers,
        }
        try:
            fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            async with self._client.stream("POST", call.url, content=content, headers=fields) as response:
                return response, await _read_body(response)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
            raise SummaryError("unreachable") from error


async def _read_body(response: httpx.Response) -> bytes:
    """Reads and decompresses the body of a response.

    Raises:
        SummaryError: If the body is too large or cannot be decompressed. The reason is `garbage` for a
            successful response, and `http-` with the status for an error response.
    """
    encoding = response.headers.get("content-encoding", "")
    plain = encoding.strip().lower() in IDENTITY
    inflater = Inflater(encoding, MAX_ANSWER_BYTES)
    body = bytearray()
    async for chunk in response.aiter_bytes() if plain else response.aiter_raw():
        body += chunk if plain else inflater.feed(chunk)
        if len(body) > MAX_ANSWER_BYTES or (inflater.has_failed and not plain):
            raise SummaryError("garbage" if response.is_success else f"http-{response.status_code}")
    return bytes(body)


def _parse_answer(body: bytes, asking: SummaryCallFormat) -> SummaryAnswer:
    """Parses the body of a response with a success status.

    Raises:
        SummaryError: With the reason `overflow` if the body is an error that says that the request is too
            long. Some providers send such an error with status 200. With the reason `garbage` if the body is
            not a valid response.
    """
    overflow = parse_overflow(httpx.codes.OK, body)
    if overflow is not None:
        raise SummaryError("overflow", limit=overflow.limit_tokens)
    return asking.parse_answer(body)


def _build_failure(response: httpx.Response, body: bytes) -> SummaryError:
    status = response.status_code
    unknown = status == httpx.codes.NOT_FOUND or (b"model" in body and b"not_found" in body)
    return SummaryError(
        "unknown-model" if unknown else f"http-{status}",
        retry_after_s=_parse_retry_after(response.headers.get("retry-after", "")),
    )


def _parse_retry_after(retry_after: str) -> float:
    """Returns the number of seconds that the header `retry-after` gives; 0 if it is empty or invalid.

    Also returns 0 for a date, because providers send a date only if the client should wait so long that a
    retry is useless.
    """
    return float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
