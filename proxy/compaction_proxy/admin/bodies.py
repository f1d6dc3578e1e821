"""How much of a request's body is read where the admin API answers."""

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.status import HTTP_413_CONTENT_TOO_LARGE
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compaction_proxy.gateway.body_budget import BodyBudget

# The largest is a pin: 2,000 characters, each of them at most 12 bytes where JSON escapes it.
MAX_BODY_BYTES = 65_536
# The largest body of all is a form with a pasted transcript. A body of no declared length may be as large.
LARGEST_BYTES = 24 * 1024 * 1024
# The end of a path that takes a whole conversation, and bounds what it reads by itself.
REPLAY = "/admin/v1/replay"


@dataclass(frozen=True, slots=True)
class Bounded:
    """Refuses with 413 to read more than `MAX_BODY_BYTES` of a body below a path. Pure ASGI.

    Starlette has a limit of its own, whose answer cannot be given OpenAI's shape.

    Attributes:
        app: What is behind it; turns an HTTPException into an answer.
        path: Requests whose path does not begin so are not bounded.
    """

    app: ASGIApp
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; what is not asked for is not read."""
        path = scope.get("path", "")
        if not path.startswith(self.path) or path.endswith(REPLAY):
            await self.app(scope, receive, send)
            return
        left = MAX_BODY_BYTES

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(HTTP_413_CONTENT_TOO_LARGE)
            return message

        await self.app(scope, bounded, send)


@dataclass(frozen=True, slots=True)
class HeldBodies:
    """Counts the bodies of requests in the budget of the process. Pure ASGI.

    Attributes:
        app: What is behind it; turns `Overloaded` into an answer.
        bodies: The budget.
    """

    app: ASGIApp
    bodies: BodyBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its body is counted as it is read, until the answer has ended."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        hold = self.bodies.open()

        async def counted() -> Message:
            message = await receive()
            if not hold.add(len(message.get("body", b""))):
                declared = Headers(scope=scope).get("content-length", "")
                whole = int(declared) if declared.isdecimal() else None
                if not message.get("more_body"):
                    whole = hold.size_bytes
                await hold.wait_for_rest(whole, LARGEST_BYTES)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            hold.release()
