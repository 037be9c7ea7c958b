"""Routes of the dashboard: the files of the pages, and the API whose answers they show."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from shadho_celery import charts
from shadho_celery.charts.columns import Depth
from shadho_celery.charts.losses import comparisons
from shadho_celery.charts.study import packed
from shadho_celery.core.checks import one_line, short
from shadho_celery.core.records import Answer
from shadho_celery.core.system import Clock
from shadho_celery.dashboard import answers
from shadho_celery.dashboard.access import HEADERS, Access, Guard, cookie_name
from shadho_celery.dashboard.answers import LogEnds
from shadho_celery.dashboard.cache import Cache, CachedStudy, Shared
from shadho_celery.errors import ServiceError, ShadhoError, StoreError, StudyNotFound, UsageError
from shadho_celery.results.study import plain_json
from shadho_celery.session.control import Control

log = logging.getLogger(__name__)

#: folder with the files of the pages, and folder with the files that draw charts
STATIC, PAGES = Path(__file__).parent / "static", Path(charts.__file__).parent / "static"
#: seconds between two checks for changes; and seconds without a change after which a stream repeats its last event
LOOK_SECONDS, ALIVE_SECONDS = 0.25, 15.0
#: maximum number of event streams, and minimum bytes of an answer that is compressed
MOST_STREAMS, LEAST_COMPRESSED = 100, 1000

#: seconds for which the answer about the last week is kept
WEEK_FRESH_SECONDS = 60.0

#: maximum number of studies that are compared
MOST_COMPARED = 10

#: function that returns the data about fleets that `status` shows
Fleet = Callable[[], Sequence[dict[str, Any]]]


class Server:
    """The routes of the dashboard for the studies of one store."""

    def __init__(
        self,
        cache: Cache,
        access: Access,
        fleet: Fleet,
        *,
        control: Control,
        logs: LogEnds,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        """`say` is called with a new code each time a browser has used the previous code."""
        self._cache, self._access, self._say = cache, access, say
        self._control, self._logs = control, logs
        #: thread for calls of Redis and brokers. Servers may not respond, and other requests must not wait for a thread
        #: then. It is one thread only, because such a call sets environment variables with the URLs of embedded servers
        self._asking = ThreadPoolExecutor(1, "asking")
        self._fleet = Shared(partial(places, fleet), self._asking, clock)
        # Reading the attempts of a week may take seconds.
        make_week = partial(answers.week, cache.store)
        self._week = Shared(lambda: make_week(clock.wall()), ThreadPoolExecutor(1, "week"), clock, WEEK_FRESH_SECONDS)
        self._streams = 0

    @property
    def app(self) -> Starlette:
        """The ASGI application."""
        trial = "/api/study/{name}/trial/{number:int}"
        routes = [
            # Links are followed, because some installers link a package's files to files in a cache.
            Mount("/static", StaticFiles(directory=STATIC, follow_symlink=True)),
            Mount("/pages", StaticFiles(directory=PAGES, follow_symlink=True)),
            Route("/login", self.log_in, methods=["POST"]),
            Route("/api/studies", self.studies),
            Route("/api/compare", self.compare),
            Route("/api/fleet", self.fleet),
            Route("/api/week", self.week),
            Route("/api/study/{name}", self.of_study(summary)),
            Route("/api/study/{name}/chart/{chart}", self.of_study(chart)),
            Route("/api/study/{name}/trials", self.of_study(lambda c, r: answers.trials_page(c, r.query_params))),
            Route("/api/study/{name}/trials.csv", self.download),
            Route(trial, self.of_study(lambda c, r: answers.trial(c, r.path_params["number"]))),
            Route(
                f"{trial}/log",
                self.of_study(lambda c, r: self._logs.read(c.study, r.path_params["number"], r.query_params)),
            ),
            Route("/api/study/{name}/events", self.events),
            Route("/api/study/{name}/action", self.act_on_study, methods=["POST"]),
            Route("/api/worker/action", self.act_on_worker, methods=["POST"]),
            # The page, which requests everything else.
            Mount("/", StaticFiles(directory=STATIC, html=True, follow_symlink=True)),
        ]
        middleware = [
            Middleware(Guard, access=self._access),
            Middleware(GZipMiddleware, minimum_size=LEAST_COMPRESSED, compresslevel=4),
        ]
        handlers = {ShadhoError: refuse, ClientDisconnect: refuse, Exception: fail}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    async def log_in(self, request: Request) -> Response:
        """Exchange a code or the token for a cookie."""
        try:
            body = msgspec.json.decode(await request.body(), type=dict[str, str])
        except (msgspec.MsgspecError, UnicodeDecodeError, ClientDisconnect):
            body = {}
        session = self._access.log_in(body.get("code", ""))
        if session is None:
            return answer({"error": "this address was used before or is old; use the one that was printed last"}, 401)
        response = answer({})
        response.set_cookie(cookie_name(request.headers), session, httponly=True, samesite="strict")
        if not self._access.has_code:
            self._say(self._access.new_code())
        return response

    def studies(self, request: Request) -> Response:
        """Return the list of studies."""
        return answer(answers.studies(self._cache))

    def compare(self, request: Request) -> Response:
        """Return the comparison of the studies whose names are in the query, joined by "/"."""
        names = [name for name in request.query_params.get("names", "").split("/") if name][:MOST_COMPARED]
        if not names:
            raise UsageError("no study is named; give names=FIRST/SECOND")
        charts = comparisons({name: self._cache.study(name).trials(Depth.LOSSES) for name in names})
        return answer([packed(each) for each in charts])

    async def fleet(self, request: Request) -> Response:
        """Return a page of the workers of the fleet, or of each embedded fleet in this folder."""
        found = await self._fleet.get()
        asked = dict(request.query_params)
        return answer(found | {"places": [answers.workers_page(place, asked) for place in found["places"]]})

    async def week(self, request: Request) -> Response:
        """Return what the studies of the store have used in the last week, and the busy slots of the last day."""
        return answer(await self._week.get())

    def of_study(self, make: Callable[[CachedStudy, Request], object]) -> Callable[[Request], Response]:
        """Return a route that answers with the result of `make` for a study."""
        return lambda request: answer(make(self._cache.study(request.path_params["name"]), request))

    def download(self, request: Request) -> Response:
        """Return the trials that match the filters as a CSV file."""
        text = answers.trials_csv(self._cache.study(request.path_params["name"]), request.query_params)
        headers = {"cache-control": "no-store", "content-disposition": 'attachment; filename="trials.csv"'}
        return Response(text, 200, headers, "text/csv")

    async def act_on_study(self, request: Request) -> Response:
        """Carry out an action on a running study. The answer says whether it was done, and the result or reason."""
        body = await request.body()
        cached = await run_in_threadpool(self._cache.study, request.path_params["name"])
        return await self._acted(partial(answers.act, self._control, body, cached.study.key))

    async def act_on_worker(self, request: Request) -> Response:
        """Drain a worker, or undrain it."""
        body = await request.body()
        return await self._acted(partial(answers.act, self._control, body))

    async def _acted(self, act: Callable[[], Answer]) -> Response:
        try:
            return answer(await asyncio.get_running_loop().run_in_executor(self._asking, act))
        finally:
            self._fleet.forget()

    async def events(self, request: Request) -> Response:
        """Return a stream of events: one after each change of the study, and one when the store cannot be read."""
        cached = await run_in_threadpool(self._cache.study, request.path_params["name"])
        if self._streams >= MOST_STREAMS:
            return answer({"error": f"{MOST_STREAMS} pages are open; close some"}, 503)

        async def stream() -> AsyncIterator[str]:
            self._streams += 1
            try:
                last: object = None
                silent = 0.0
                while True:
                    try:
                        event, text = "message", str(await run_in_threadpool(cached.look))
                    except StoreError as error:
                        # The stream continues, because the store may become available again.
                        event, text = "trouble", one_line(error, 500)
                        if last != (event, text):
                            log.warning("%s", text)
                    if (event, text) != last or silent >= ALIVE_SECONDS:
                        yield f"event: {event}\ndata: {text}\n\n"
                        last, silent = (event, text), 0.0
                    await asyncio.sleep(LOOK_SECONDS)
                    silent += LOOK_SECONDS
            except StudyNotFound:
                return
            finally:
                self._streams -= 1

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def summary(cached: CachedStudy, request: Request) -> object:
    """Return the data for the top of a study's page."""
    return cached.answer("summary", partial(answers.summary, cached))


def chart(cached: CachedStudy, request: Request) -> object:
    """Return a chart by its name, with its arguments in the query."""
    name, asked = request.path_params["chart"], dict(request.query_params)
    return cached.answer((name, *sorted(asked.items())), partial(answers.chart, cached, name, asked))


def places(fleet: Fleet) -> dict[str, Any]:
    """Return the data about the fleet, or the reason why the data cannot be read."""
    try:
        return {"places": [*fleet()]}
    except ServiceError as error:
        return {"places": [], "trouble": str(error)}


def answer(found: object, status: int = 200) -> Response:
    """Return an answer as JSON, with null for NaN and infinity."""
    try:
        body = msgspec.json.encode(found)
    except (OverflowError, UnicodeEncodeError):
        # An objective may return an integer of any size, or a text that is not valid Unicode. `json` is slower.
        body = json.dumps(plain_json(found)).encode()
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


async def fail(request: Request, error: Exception) -> Response:
    """Return the answer for a request that fails because of a bug in this program. The traceback is logged."""
    found = answer(
        {"error": f"a fault of the dashboard, whose terminal has its details: {short(repr(error), 300)}"}, 500
    )
    # The headers are added here, because this answer does not pass through `Guard`.
    found.headers.update(HEADERS | {"cache-control": "no-store"})
    return found


async def refuse(request: Request, error: Exception) -> Response:
    """Return the answer for a request that cannot be served, with the reason in one line."""
    status = 404 if isinstance(error, StudyNotFound) else 503 if isinstance(error, ServiceError | StoreError) else 400
    return answer({"error": short(error, 500)}, status)
