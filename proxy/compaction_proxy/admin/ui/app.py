"""The application that serves the admin pages and passes other requests to the admin API."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.admin.auth import BASIC, AccessMiddleware, AccessPolicy
from compaction_proxy.admin.ui.actions import ActionRoutes
from compaction_proxy.admin.ui.api import InProcessAdminClient, PageError
from compaction_proxy.admin.ui.pages import PageRoutes
from compaction_proxy.admin.ui.replay import PlaygroundRoutes
from compaction_proxy.admin.ui.templates import Templates
from compaction_proxy.core.errors import OverloadedError
from compaction_proxy.gateway.body_budget import RETRY_AFTER_S

PATH = "/ui"
_CONVERSATION = "/conversations/{name}"


def _build_routes(
    page_routes: PageRoutes, action_routes: ActionRoutes, playground: PlaygroundRoutes
) -> list[Route]:
    get_routes = {
        "": page_routes.show_overview,
        "/": page_routes.show_overview,
        "/conversations": page_routes.show_conversations,
        _CONVERSATION: page_routes.show_conversation,
        _CONVERSATION + "/compactions/{place}": page_routes.show_compaction,
        _CONVERSATION + "/compactions/{place}/prompts": page_routes.show_prompts,
        _CONVERSATION + "/messages/{message}": page_routes.show_message,
        _CONVERSATION + "/search": page_routes.show_search,
        "/failures": page_routes.show_failures,
        "/settings": page_routes.show_settings,
        "/playground": playground.show_form,
        "/static/{name}": page_routes.templates.serve_static,
    }
    post_routes = {
        _CONVERSATION + "/pin": action_routes.pin_text,
        _CONVERSATION + "/unpin": action_routes.unpin_text,
        _CONVERSATION + "/remove": action_routes.remove_instruction,
        _CONVERSATION + "/restore": action_routes.restore_instruction,
        _CONVERSATION + "/delete": action_routes.delete_conversation,
        _CONVERSATION + "/{action}": action_routes.run_action,
        "/playground": playground.show_results,
    }
    root = page_routes.templates.root
    return [
        *(Route(root + path, answer, methods=["POST"]) for path, answer in post_routes.items()),
        *(Route(root + path, answer, methods=["GET"]) for path, answer in get_routes.items()),
    ]


def mount_pages(admin: ASGIApp, access: AccessPolicy, base_path: str = "") -> ASGIApp:
    """Creates an application that serves the pages and passes all other requests to `admin`.

    Args:
        admin: Application that serves the admin API.
        access: Rules for access to the pages.
        base_path: Empty, or a path that starts with `/` and does not end with it.
    """
    root = base_path + PATH
    site = AccessMiddleware(
        _create_site(InProcessAdminClient(admin, access.key, base_path), Templates(root)),
        access,
        root,
        scheme=BASIC,
    )

    async def dispatch_request(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{root}/")
        await (site if ours else admin)(scope, receive, send)

    return dispatch_request


def _create_site(api: InProcessAdminClient, pages: Templates) -> ASGIApp:
    page_routes = PageRoutes(api, pages)

    async def show_page_error(_: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, PageError) else 500
        return await page_routes.show_error(status, str(error))

    async def show_overload(_: Request, error: Exception) -> Response:
        answer = await page_routes.show_error(OverloadedError.status, str(error))
        answer.headers["retry-after"] = str(RETRY_AFTER_S)
        return answer

    async def show_not_found(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return await page_routes.show_error(status, "There is no such page.")

    routes = _build_routes(page_routes, ActionRoutes(api, pages), PlaygroundRoutes(api, pages))
    handlers = {PageError: show_page_error, OverloadedError: show_overload, HTTPException: show_not_found}
    return Starlette(routes=routes, exception_handlers=handlers)
