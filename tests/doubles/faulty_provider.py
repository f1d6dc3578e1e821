"""Implements the demo provider with faults: error statuses, cut and delayed responses, and garbage."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from compaction_proxy.cli.demo import chat
from compaction_proxy.cli.demo.chat import JsonObject
from compaction_proxy.cli.demo.provider import (
    ClientDepartedError,
    DemoClient,
    DemoProvider,
    DemoProviderSettings,
    Receive,
    Scope,
    SeenRequest,
    Send,
)
from compaction_proxy.cli.demo.validation import Refusal

FAULT_HEADER = "x-demo-fault"
GARBAGE = b'\x00\xff{"choices":[{"delta":\xfe'


@dataclass(frozen=True, slots=True)
class Fault:
    """The faults of a response. By default, the response has no fault.

    Attributes:
        status: Error status of the response; 0 for no error.
        hang: Whether the provider never responds.
        cut_after: Number of stream chunks after which the provider closes the connection. If the response is
            not streamed, the provider closes the connection after half of the body. None does not close it
            early.
        garbage: Whether the response has status 200 and bytes that are not a chat completion.
        empty: Whether the response has status 200 and no content. It then has no body, or is a stream whose
            only event is `[DONE]`.
        first_byte_s: Seconds before the first byte of the response.
        chunk_s: Seconds before each further chunk of a stream.
    """

    status: int = 0
    hang: bool = False
    cut_after: int | None = None
    garbage: bool = False
    empty: bool = False
    first_byte_s: float = 0.0
    chunk_s: float = 0.0


NO_FAULT = Fault()

_FAULT_WORDS: dict[str, Callable[[Fault, str], Fault]] = {
    "status": lambda fault, value: replace(fault, status=int(value)),
    "hang": lambda fault, _: replace(fault, hang=True),
    "cut": lambda fault, value: replace(fault, cut_after=int(value or 3)),
    "garbage": lambda fault, _: replace(fault, garbage=True),
    "empty": lambda fault, _: replace(fault, empty=True),
    "slow": lambda fault, value: replace(fault, first_byte_s=float(value)),
    "delay": lambda fault, value: replace(fault, chunk_s=float(value)),
}


def parse_fault(text: str, base: Fault = NO_FAULT) -> Fault:
    """Parses a text such as `slow=0.5, cut=3` and returns `base` with these faults added.

    The possible words are `status=N`, `hang`, `cut[=chunks]`, `garbage`, `empty`, `slow=seconds` (before the
    first byte) and `delay=seconds` (before each further chunk).

    Raises:
        ValueError: If a word is unknown or its value is invalid.
    """
    fault = base
    for word in filter(str.strip, text.split(",")):
        name, _, value = word.strip().partition("=")
        if name not in _FAULT_WORDS:
            raise ValueError(f"no such fault: {name}")
        fault = _FAULT_WORDS[name](fault, value)
    return fault


class FaultyClient(DemoClient):
    """The connection to the client of one request. The client may disconnect before the response is complete.

    Attributes:
        fault: The faults of the response.
    """

    fault = NO_FAULT

    async def wait(self, seconds: float | None) -> None:
        """Waits for `seconds` seconds. If `seconds` is None, waits until the client disconnects.

        Raises:
            ClientDepartedError: If the client disconnects during the wait.
        """
        if seconds == 0:
            return
        try:
            async with asyncio.timeout(seconds):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return
        raise ClientDepartedError

    async def start(self, status: int, kind: bytes, length: int | None = None) -> None:
        """Sends the status and the headers, after the delay of the fault."""
        await self.wait(self.fault.first_byte_s)
        await super().start(status, kind, length)

    async def send_json(self, status: int, data: bytes) -> None:
        """Sends a response that is not streamed. If the fault cuts the response, sends half of the body.

        The server then closes the connection. Responses with another status than 200 have no faults.
        """
        if status == 200:
            data = GARBAGE if self.fault.garbage else b"" if self.fault.empty else data
        if status != 200 or self.fault.cut_after is None:
            await super().send_json(status, data)
            return
        await self.start(200, b"application/json", len(data))
        await self.send(data[: len(data) // 2], more=True)

    async def send_stream(self, events: Iterable[bytes]) -> None:
        """Sends a stream. If the fault cuts the stream, returns before the body is complete."""
        await self.start(200, b"text/event-stream; charset=utf-8")
        shown = (each for each in events if not self.fault.empty or each == chat.DONE)
        for index, event in enumerate(shown):
            if index == self.fault.cut_after:
                return
            await self.wait(self.fault.chunk_s if index else 0)
            await self.send(GARBAGE if self.fault.garbage else event, more=True)
        await self.send(b"")


class FaultyProvider(DemoProvider):
    """The demo provider, whose responses may have faults.

    Args:
        settings: The settings of the demo provider.
        faults: Maps the name of a model to the faults of its responses. The entry `*` applies to all models
            without an entry of their own. The request header `x-demo-fault` adds further faults.

    Attributes:
        departure_count: Number of requests that the provider gave up because the client had disconnected.
    """

    def __init__(self, settings: DemoProviderSettings, faults: Mapping[str, Fault] | None = None) -> None:
        super().__init__(settings)
        self._faults = faults or {}
        self.departure_count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one HTTP request, or the lifespan events of the server."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        try:
            await self._route_request(scope, FaultyClient(receive, send))
        except ClientDepartedError:
            self.departure_count += 1

    async def _answer_request(
        self, body: JsonObject, seen: SeenRequest, refusal: Refusal | None, client: DemoClient
    ) -> None:
        refusal = await self._choose_fault(seen, refusal, client)
        await super()._answer_request(body, seen, refusal, client)

    async def _choose_fault(
        self, seen: SeenRequest, refusal: Refusal | None, client: DemoClient
    ) -> Refusal | None:
        """Gives the client the fault of its response. Returns the refusal to send; None if there is none.

        A refused request gets no fault. An error status of the fault becomes a refusal. If the fault is to
        hang, the method logs the request and waits until the client disconnects.
        """
        assert isinstance(client, FaultyClient)
        fault = self._faults.get(seen.model) or self._faults.get("*") or NO_FAULT
        try:
            words = ",".join(value for name, value in seen.headers if name == FAULT_HEADER)
            fault = parse_fault(words, fault)
        except ValueError as error:
            refusal = refusal or Refusal(f"Invalid x-demo-fault: {error}")
        if refusal:
            return refusal
        client.fault = fault
        if fault.status:
            code = "rate_limit_exceeded" if fault.status == 429 else None
            message = f"The demo provider returns {fault.status}, as requested."
            return Refusal(message, code=code, status=fault.status, kind="server_error")
        if fault.hang:
            self._log.append(replace(seen, status=0))
            await client.wait(None)
        return None


def get_header(scope: Scope, name: bytes) -> bytes:
    """Returns the values of a request header, joined by commas."""
    return b",".join(value for own, value in scope["headers"] if own == name)
