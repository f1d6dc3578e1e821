"""What the buttons of a conversation do: each asks the admin API, and leads back to a page."""

import json
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from compaction_proxy.admin.ui.api import Api, Refused
from compaction_proxy.admin.ui.forms import form, one
from compaction_proxy.admin.ui.templates import HEADERS, Pages
from compaction_proxy.support.formatting import segment

# Actions without anything to say beside the conversation; each is a path of the API.
PLAIN = frozenset({"compact", "undo", "bypass", "resume"})
_SEE_OTHER = 303


@dataclass(frozen=True, slots=True)
class Acting:
    """Answers POST below a conversation.

    Attributes:
        api: What does it.
        pages: Where to go afterwards.
    """

    api: Api
    pages: Pages

    async def plain(self, request: Request) -> Response:
        """Compact with the next request, undo the newest round, stop compacting, or go on with it."""
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in PLAIN:
            raise Refused(404, "There is no such action.")
        await self.api.post(request, "conversations", name, action)
        return self._back(name, action)

    async def pin(self, request: Request) -> Response:
        """Pin a text."""
        name = request.path_params["name"]
        text = one(await form(request), "text")
        await self.api.post(request, "conversations", name, "pins", body=json.dumps({"text": text}).encode())
        return self._back(name, "pin")

    async def unpin(self, request: Request) -> Response:
        """Let go of a pinned text."""
        name = request.path_params["name"]
        await self.api.delete(request, "conversations", name, "pins", one(await form(request), "pin"))
        return self._back(name, "unpin")

    async def remove(self, request: Request) -> Response:
        """Leave instructions of the project out."""
        return await self._change_instruction(request, "remove")

    async def restore(self, request: Request) -> Response:
        """Keep instructions of the project again."""
        return await self._change_instruction(request, "restore")

    async def _change_instruction(self, request: Request, action: str) -> Response:
        name = request.path_params["name"]
        ask = self.api.delete if action == "remove" else self.api.post
        await ask(request, "conversations", name, "instructions", one(await form(request), "instruction"))
        return self._back(name, action)

    async def delete(self, request: Request) -> Response:
        """Delete everything that is stored of the conversation."""
        await self.api.delete(request, "conversations", request.path_params["name"])
        return self._to("/conversations?done=deleted")

    def _back(self, name: str, done: str) -> Response:
        return self._to(f"/conversations/{segment(name)}?done={done}")

    def _to(self, path: str) -> Response:
        headers = {**HEADERS, "cache-control": "no-store"}
        return RedirectResponse(f"{self.pages.root}{path}", _SEE_OTHER, headers)
