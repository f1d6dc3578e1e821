"""The pages as an application, beside the admin API that they ask."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.admin.auth import BASIC, Access, Guard
from compaction_proxy.admin.ui.actions import Acting
from compaction_proxy.admin.ui.api import Api, Refused
from compaction_proxy.admin.ui.pages import Looking
from compaction_proxy.admin.ui.replay import Playground
from compaction_proxy.admin.ui.templates import Pages
from compaction_proxy.core.errors import Overloaded
from compaction_proxy.gateway.body_budget import RETRY_AFTER_S

PATH = "/ui"
_CONVERSATION = "/conversations/{name}"


def _routes(looking: Looking, acting: Acting, playground: Playground) -> list[Route]:
    shown = {
        "": looking.overview,
        "/": looking.overview,
        "/conversations": looking.conversations,
        _CONVERSATION: looking.conversation,
        _CONVERSATION + "/compactions/{place}": looking.compaction,
        _CONVERSATION + "/compactions/{place}/prompts": looking.prompts,
        _CONVERSATION + "/messages/{message}": looking.message,
        _CONVERSATION + "/search": looking.search,
        "/failures": looking.failures,
        "/settings": looking.settings,
        "/playground": playground.empty,
        "/static/{name}": looking.pages.static,
    }
    done = {
        _CONVERSATION + "/pin": acting.pin,
        _CONVERSATION + "/unpin": acting.unpin,
        _CONVERSATION + "/remove": acting.remove,
        _CONVERSATION + "/restore": acting.restore,
        _CONVERSATION + "/delete": acting.delete,
        _CONVERSATION + "/{action}": acting.plain,
        "/playground": playground.tried,
    }
    root = looking.pages.root
    return [
        *(Route(root + path, answer, methods=["POST"]) for path, answer in done.items()),
        *(Route(root + path, answer, methods=["GET"]) for path, answer in shown.items()),
    ]


def with_pages(admin: ASGIApp, access: Access, base_path: str = "") -> ASGIApp:
    """An application that answers the pages itself, and leaves everything else to `admin`.

    Args:
        admin: What answers the admin API, which the pages show.
        access: Who may look at them.
        base_path: Empty, or a path that starts with `/` and does not end with it.
    """
    root = base_path + PATH
    site = Guard(_site(Api(admin, access.key, base_path), Pages(root)), access, root, scheme=BASIC)

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{root}/")
        await (site if ours else admin)(scope, receive, send)

    return answered


def _site(api: Api, pages: Pages) -> ASGIApp:
    looking = Looking(api, pages)

    async def refused(_: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, Refused) else 500
        return await looking.trouble(status, str(error))

    async def overloaded(_: Request, error: Exception) -> Response:
        answer = await looking.trouble(Overloaded.status, str(error))
        answer.headers["retry-after"] = str(RETRY_AFTER_S)
        return answer

    async def nothing(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return await looking.trouble(status, "There is no such page.")

    routes = _routes(looking, Acting(api, pages), Playground(api, pages))
    handlers = {Refused: refused, Overloaded: overloaded, HTTPException: nothing}
    return Starlette(routes=routes, exception_handlers=handlers)
