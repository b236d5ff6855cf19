"""The token, asked for once: a cookie stands for it that a form sets, no script reads and no other site is sent."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs, quote, urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.control.api.dependencies import Context
from services.control.auth import COOKIE
from services.control.web.render import PageRoute, page

LOGIN = "/login"
KEPT_S = 30 * 24 * 3600
OURS = ("/v1/", "/metrics", "/livez", "/readyz", "/static/", "/openapi.json")
"""What is no page, and is answered as it is."""

router = APIRouter(route_class=PageRoute)


@router.get(LOGIN)
def ask(request: Request, context: Context, to: Annotated[str, Query(alias="next", max_length=2000)] = "/") -> Response:
    """Ask for the token."""
    if context.auth.token is None:
        return RedirectResponse("/", 303)
    return page(request, "login.html", next=own_path(to), wrong=False)


@router.post(LOGIN)
async def enter(request: Request, context: Context) -> Response:
    """Compare the token, and remember the browser."""
    given = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=4)
    token, to = (given.get(name, [""])[0] for name in ("token", "next"))
    if not context.auth.accepts(token.strip()):
        return page(request, "login.html", status=403, next=own_path(to), wrong=True)
    answer = RedirectResponse(own_path(to), 303)
    answer.set_cookie(
        COOKIE, context.auth.cookie, max_age=KEPT_S, httponly=True, samesite="strict",
        secure=request.url.scheme == "https",
    )  # fmt: skip
    return answer


@router.post("/logout")
def leave() -> Response:
    """Forget the browser's cookie."""
    answer = RedirectResponse(LOGIN, 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def own_path(path: str) -> str:
    r"""A path of this site, whatever was asked for.

    >>> [own_path(p) for p in ("/runs/a?b=c", "//evil.example", "https://evil.example", "/\\evil", "")]
    ['/runs/a?b=c', '/', '/', '/', '/']
    """
    fine = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if fine else "/"


class LoginRedirect:
    """Middleware that turns the refusal of a page for want of a token into the way to where it is asked for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let everything through but a 401 to a page."""
        if scope["type"] != "http" or scope["path"].startswith(OURS):
            await self._app(scope, receive, send)
            return
        leading = False

        async def leads(message: Message) -> None:
            nonlocal leading
            if message["type"] == "http.response.start" and message["status"] == 401:
                leading = True
                await _lead(scope, receive, send)
            elif not leading:
                await send(message)

        await self._app(scope, receive, leads)


async def _lead(scope: Scope, receive: Receive, send: Send) -> None:
    headers = Headers(scope=scope)
    if "hx-request" in headers:
        answer = Response(status_code=401)
        MutableHeaders(raw=answer.raw_headers)["HX-Redirect"] = LOGIN
    else:
        there = quote(scope["path"]) if scope["method"] == "GET" else "/"
        answer = RedirectResponse(f"{LOGIN}?{urlencode({'next': there})}", 303)
    await answer(scope, receive, send)
