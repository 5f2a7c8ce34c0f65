"""The web server: a page, its data, and nothing that changes anything. Loopback by default;
elsewhere only with a token.
"""

import hmac
import json
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from fedbcd.dashboard import is_loopback
from fedbcd.dashboard.changes import Sent
from fedbcd.dashboard.deployment import WatchedDeployment
from fedbcd.dashboard.library import Library, Watched
from fedbcd.report.advice import advice
from fedbcd.report.page import SCRIPTS, static, styles

COOKIE = "fedbcd_token"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
        " data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Next = Callable[[Request], Awaitable[Response]]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fedbcd dashboard</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/view.css">
</head>
<body>
<a class="skip" href="#main">Skip to the dashboard</a>
<div id="page"><p class="notice">Loading ...</p></div>
<noscript><p class="notice">The dashboard needs JavaScript, which is switched off here;
fedbcd report writes a page to keep.</p></noscript>
{scripts}
</body>
</html>
""".replace(
    "{scripts}",
    "\n".join(f'<script src="static/{name}"></script>' for name in (*SCRIPTS, "dashboard.js")),
)


def make_app(
    library: Library, deployment: WatchedDeployment | None = None, token: str | None = None
) -> Starlette:
    """The application. With a token every request must bring it; without one, only requests to this
    machine's own name are answered.
    """
    pages = _Pages(library, deployment)
    routes = [
        Route("/", pages.index),
        Route("/static/{name}", pages.static),
        Route("/api/runs", pages.runs),
        Route("/api/view", pages.view),
        Route("/api/timeline", pages.timeline),
        Route("/api/devices", pages.devices),
        Route("/api/plan", pages.plan),
    ]
    guard = Middleware(_Guard, token=token)
    return Starlette(
        routes=routes,
        middleware=[guard, Middleware(GZipMiddleware, minimum_size=2_000, compresslevel=3)],
    )


class _Guard(BaseHTTPMiddleware):
    """Who may ask: with a token, those who bring it; without, those who reached us under a loopback
    name (no rebinding of names).
    """

    def __init__(self, app: Any, token: str | None) -> None:
        super().__init__(app)
        self._token = token

    async def dispatch(self, request: Request, call_next: Next) -> Response:
        if self._token is None:
            response = (
                await call_next(request)
                if is_loopback(request.url.hostname or "")
                else _refused("this name is not a loopback one")
            )
        else:
            response = await self._with_token(request, call_next)
        response.headers.update(HEADERS)
        return response

    async def _with_token(self, request: Request, call_next: Next) -> Response:
        assert self._token is not None
        given = request.query_params.get("token")
        if given is not None and self._is_right(given):
            answer: Response = RedirectResponse(request.url.path, status_code=303)
            answer.set_cookie(
                COOKIE,
                self._token,
                httponly=True,
                samesite="strict",
                secure=request.url.scheme == "https",
            )
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_right(request.cookies.get(COOKIE, "")) or self._is_right(bearer):
            return await call_next(request)
        return _refused("open the address that fedbcd dashboard has printed, with its token", 401)

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())


def _refused(reason: str, status: int = 403) -> Response:
    return Response(f"refused: {reason}\n", status_code=status, media_type="text/plain")


class _Pages:
    """The answers."""

    def __init__(self, library: Library, deployment: WatchedDeployment | None) -> None:
        self.library, self.deployment = library, deployment
        self._sent = Sent()
        self._files = {"view.css": styles(), **{name: static(name) for name in SCRIPTS}}
        self._files["dashboard.js"] = (
            files("fedbcd.dashboard") / "static" / "dashboard.js"
        ).read_text(encoding="utf-8")

    async def index(self, request: Request) -> Response:  # noqa: ARG002
        return HTMLResponse(PAGE)

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            return _refused("there is no such file", 404)
        return Response(
            self._files[name], media_type="text/css" if name.endswith(".css") else "text/javascript"
        )

    async def runs(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse(await run_in_threadpool(self.library.runs))

    async def view(self, request: Request) -> Response:
        """The views of the picked runs, and of the deployment if there is one; of one that the page
        has, what has changed since; 204 where nothing has.
        """
        keys = [key for key in request.query_params.get("runs", "").split(",") if key]
        version, view = await run_in_threadpool(self.library.view, keys)
        if self.deployment is not None:
            version += await run_in_threadpool(self._add_deployment, self.deployment, view)
        theirs = request.query_params.get("version")
        if theirs == version:
            return Response(status_code=204)
        return _json(self._sent.answer(view, version, theirs))

    def _add_deployment(self, deployment: WatchedDeployment, view: dict[str, Any]) -> str:
        """Put what its roles say beside the runs; a word that changes with it."""
        folder = deployment.folder if deployment.has_log else None
        seen, mine = deployment.view(None if folder is None else self.library.standing(folder))
        for run in view["runs"]:
            if run["folder"] == str(folder):
                run["advice"] = advice(run, mine["dead"])
        view["runs"] = [mine["run"], *view["runs"]] if mine["run"] else view["runs"]
        view["title"] = ", ".join(run["name"] for run in view["runs"][:3])
        view |= {
            "deployment": mine["roles"],
            "metrics": mine["metrics"],
            "standing": mine["standing"],
        }
        return seen

    async def timeline(self, request: Request) -> Response:
        begin, end = _number(request, "begin"), _number(request, "end")
        if begin is None or end is None:
            return _refused("begin and end must be numbers", 400)
        key = request.query_params.get("run", "")
        if self.deployment is not None and key == self.deployment.key:
            return _json(self.deployment.timeline(begin, end))
        return await self._of_run(key, lambda run: run.timeline(begin, end))

    async def devices(self, request: Request) -> Response:
        query = request.query_params
        sort, only = query.get("sort", "device"), query.get("only", "")
        down, start = query.get("down") == "1", max(0, int(_number(request, "start") or 0))
        return await self._of_run(
            query.get("run", ""), lambda run: run.devices(sort, down, start, only)
        )

    async def plan(self, request: Request) -> Response:
        key = request.query_params.get("run", "")
        if self.deployment is not None and key == self.deployment.key:
            return _json(await run_in_threadpool(self.deployment.plan))
        return await self._of_run(key, Watched.plan)

    async def _of_run(self, key: str, ask: Callable[[Watched], Any]) -> Response:
        for run in await run_in_threadpool(self.library.watched, [key]):
            return _json(await run_in_threadpool(ask, run))
        return _refused("there is no such run", 404)


def _json(data: Any) -> Response:
    return Response(
        json.dumps(data, separators=(",", ":"), allow_nan=False), media_type="application/json"
    )


def _number(request: Request, name: str) -> float | None:
    try:
        value = float(request.query_params.get(name, ""))
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None
