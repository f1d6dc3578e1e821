"""The application that serves the admin pages and passes on other requests."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from compaction_proxy.admin.api.routing import AdminApi
from compaction_proxy.admin.auth import BASIC, AccessMiddleware
from compaction_proxy.admin.ui.actions import ActionRoutes
from compaction_proxy.admin.ui.pages import PageRoutes
from compaction_proxy.admin.ui.replay import PlaygroundRoutes
from compaction_proxy.admin.ui.templates import Templates
from compaction_proxy.core.errors import OverloadedError, ProxyError

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
        _CONVERSATION + "/{action}": action_routes.run_action,
        "/playground": playground.show_results,
    }
    root = page_routes.templates.root
    return [
        *(Route(root + path, answer, methods=["POST"]) for path, answer in post_routes.items()),
        *(Route(root + path, answer, methods=["GET"]) for path, answer in get_routes.items()),
    ]


def mount_pages(app: ASGIApp, api: AdminApi, base_path: str = "") -> ASGIApp:
    """Creates an application that serves the pages and passes all other requests to `app`.

    Args:
        app: Application for the other requests.
        api: Parts of the admin API, which the pages use too.
        base_path: Empty, or a path that starts with `/` and does not end with it.
    """
    root = base_path + PATH
    site = AccessMiddleware(_create_site(api, Templates(root)), api.access_policy, root, scheme=BASIC)

    async def dispatch_request(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{root}/")
        await (site if ours else app)(scope, receive, send)

    return dispatch_request


def _create_site(api: AdminApi, templates: Templates) -> ASGIApp:
    async def show_error(_: Request, error: Exception) -> Response:
        answer = await templates.render_error(error)
        if isinstance(error, OverloadedError):
            answer.headers["retry-after"] = str(error.retry_after_s)
        return answer

    routes = _build_routes(
        PageRoutes(api, templates), ActionRoutes(api.commands, templates), PlaygroundRoutes(api, templates)
    )
    return Starlette(routes=routes, exception_handlers=dict.fromkeys((ProxyError, HTTPException), show_error))
