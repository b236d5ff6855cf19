"""Login page and session cookie, for browsers. The cookie is HttpOnly and SameSite=Strict."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xtoken_services.control.api.dependencies import Context
from xtoken_services.control.auth import COOKIE, RETRY_AFTER, TOO_MANY_WRONG, address_of
from xtoken_services.control.sessions import SESSION_S
from xtoken_services.control.web.form import Form
from xtoken_services.control.web.render import PageRoute, page

LOGIN = "/login"
NOT_PAGES = ("/v1/", "/metrics", "/livez", "/readyz", "/static/", "/openapi.json")
"""Paths whose 401 is not redirected to the login page."""

SIGN_IN = "pages for a browser: /login; REST: /docs, with the header Authorization: Bearer TOKEN\n"
"""Shown by clients that do not follow a redirect, such as curl."""

router = APIRouter(route_class=PageRoute)


@router.get(LOGIN)
def show_login(
    request: Request, context: Context, to: Annotated[str, Query(alias="next", max_length=2000)] = "/"
) -> Response:
    """Show the login form."""
    if context.auth.token is None:
        return RedirectResponse("/", 303)
    return page(request, "login.html", next=own_path(to), wrong=False)


@router.post(LOGIN)
async def log_in(request: Request, context: Context, fields: Form) -> Response:
    """Check the token, start a session and set its cookie; the answer to a wrong token is delayed."""
    token, to = (fields.get(name, "") for name in ("token", "next"))
    wrong, address = context.auth.wrong_tokens, address_of(request.scope)
    if wrong.blocks(address):
        raise HTTPException(429, TOO_MANY_WRONG, {"Retry-After": RETRY_AFTER})
    if not context.auth.accepts(token.strip()):
        await wrong.delay(address)
        return page(request, "login.html", status=403, next=own_path(to), wrong=True)
    response = RedirectResponse(own_path(to), 303)
    response.set_cookie(
        COOKIE,
        context.auth.sessions.open(),
        max_age=SESSION_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/logout")
def log_out(request: Request, context: Context) -> Response:
    """End the session and delete its cookie."""
    session = request.cookies.get(COOKIE)
    if session is not None:
        context.auth.sessions.close(session)
    response = RedirectResponse(LOGIN, 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


def own_path(path: str) -> str:
    r"""Return a path of this site, or `/` for anything else, so that a login redirects to no other site.

    >>> [own_path(p) for p in ("/runs/a?b=c", "//evil.example", "https://evil.example", "/\\evil", "")]
    ['/runs/a?b=c', '/', '/', '/', '/']
    """
    own = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if own else "/"


class LoginRedirect:
    """Middleware that redirects a page's 401 to the login page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; replace a 401 by a redirect."""
        if scope["type"] != "http" or scope["path"].startswith(NOT_PAGES):
            await self._app(scope, receive, send)
            return
        redirected = False

        async def redirect_401(message: Message) -> None:
            nonlocal redirected
            if message["type"] == "http.response.start" and message["status"] == 401:
                redirected = True
                await _redirect(scope, receive, send)
            elif not redirected:
                await send(message)

        await self._app(scope, receive, redirect_401)


async def _redirect(scope: Scope, receive: Receive, send: Send) -> None:
    headers = Headers(scope=scope)
    if "hx-request" in headers:
        response = Response(status_code=401)
        MutableHeaders(raw=response.raw_headers)["HX-Redirect"] = LOGIN
    else:
        path = quote(scope["path"]) if scope["method"] == "GET" else "/"
        response = Response(SIGN_IN, 303, {"Location": f"{LOGIN}?{urlencode({'next': path})}"}, "text/plain")
    await response(scope, receive, send)
