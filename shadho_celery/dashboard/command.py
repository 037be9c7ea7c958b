"""Command `dashboard`, which serves the pages on the loopback address; and the HTTP protocol with time limits.

The time limits close connections of slow clients, because the number of connections is limited.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import click
from click.core import ParameterSource
from uvicorn.protocols.http.h11_impl import H11Protocol

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.status import places_of
from shadho_celery.core.system import SystemClock
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls

HOST, PORT = "127.0.0.1", 8420
#: maximum seconds for which the dashboard waits at its end for open requests
END_SECONDS = 1
#: HTML page that redirects to another page
_LEADING = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>shadho_celery</title>
<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">Open the dashboard</a></html>
"""
#: maximum number of requests at a time
MOST_REQUESTS = 300


@shared_options.command(
    "dashboard",
    "dashboard --store postgresql://me@db/searches --port 0",
    "ssh -L 8420:127.0.0.1:8420 node shadho-celery dashboard",
    more="""It only listens on this machine. From another machine, use a tunnel as in the last example.""",
)
@shared_options.store_option
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="Port; 0 for a free one.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with a token to log in; made if missing.")
@click.option("--open", "is_opened", is_flag=True, help="Open the page in a browser.")
@click.option("--with-parent", is_flag=True, hidden=True, help="End when standard input ends, as when a run is killed.")
@shared_options.on_fleet
def dashboard(store: str, port: int, token_file: Path | None, is_opened: bool, with_parent: bool) -> None:
    """Serve web pages about the studies of a store, until Ctrl-C. They show running studies as they change."""
    try:
        import uvicorn

        from shadho_celery.dashboard.access import Access, read_token
        from shadho_celery.dashboard.answers import ANSWER_SECONDS, LogEnds
        from shadho_celery.dashboard.cache import Cache
        from shadho_celery.dashboard.server import Server
        from shadho_celery.session.control import Control, TrialLogs
        from shadho_celery.store.engine import missing_file
        from shadho_celery.store.sql import SqlStore
    except ModuleNotFoundError:
        raise UsageError('the dashboard needs its packages; in the checkout: pip install -e ".[dashboard]"') from None
    access = Access(None if token_file is None else read_token(token_file))
    is_typed = click.get_current_context().get_parameter_source("store") is ParameterSource.COMMANDLINE
    if (missing := missing_file(store)) is not None and not is_typed:
        # The page will show the first study as soon as it begins. A URL given with --store may be mistyped, so no store
        # is created for it.
        with closing(SqlStore(store)):
            say(f"there was no store {missing}; it was created, without a study")
    opened = SqlStore(store, read_only=True)
    logs = TrialLogs(is_fleet=urls.is_fleet({}), seconds=ANSWER_SECONDS)
    # On Ctrl-C, uvicorn shuts down and then raises KeyboardInterrupt.
    with suppress(KeyboardInterrupt), ExitStack() as opening, _listen(port) as listening:
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        url = f"{address}#{access.new_code()}"
        server = Server(
            Cache(opened, SystemClock()),
            access,
            places_of,
            control=Control(store=store),
            logs=LogEnds(logs, SystemClock()),
            clock=SystemClock(),
            say=lambda code: say(f"a browser has logged in; to use another one, open {address}#{code}"),
        )
        say(f"dashboard: {url}")
        if with_parent:
            threading.Thread(target=_end_with_input, daemon=True).start()
        if is_opened:
            opening.enter_context(_opened(url))
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        config = uvicorn.Config(
            server.app,
            http=PromptProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=MOST_REQUESTS,
            timeout_graceful_shutdown=END_SECONDS,
        )
        uvicorn.Server(config).run([listening])


@contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open a URL in a browser, through a temporary HTML file that redirects to it.

    The URL contains the code for the login, so it must not be an argument of the browser, which other users can see.
    """
    descriptor, name = tempfile.mkstemp(prefix="shadho-", suffix=".html")
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(_LEADING.format(url=url))
        webbrowser.open(path.as_uri())
        yield
    finally:
        path.unlink(missing_ok=True)


def _end_with_input() -> None:
    """Wait for the end of standard input, then end this process as Ctrl-C does."""
    while sys.stdin.buffer.read(1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address. Raises UsageError if the port is in use."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(f"--port: {port} cannot be used: {reason}; --port 0 takes a free one") from None


#: maximum seconds for a client to send the head of a request, to send its body (at most a megabyte), and to read an
#: answer that does not fit in the system's buffers
HEAD_SECONDS, BODY_SECONDS, READ_SECONDS = 5.0, 10.0, 60.0


class PromptProtocol(H11Protocol):
    """uvicorn's HTTP protocol with time limits. uvicorn itself only limits the idle time after an answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_if(lambda: self.cycle is None, HEAD_SECONDS)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if (begun := self.cycle) is not before and begun.more_body:
            self._close_if(lambda: self.cycle is begun and begun.more_body, BODY_SECONDS)

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()
        # If a client sends several requests at once, the next one may already have begun.
        self._close_if(lambda: self.cycle is answered, HEAD_SECONDS)

    def pause_writing(self) -> None:
        super().pause_writing()
        unread = self.cycle
        self._close_if(lambda: self.cycle is unread and self.flow.write_paused, READ_SECONDS)

    def _close_if(self, is_slow: Callable[[], bool], seconds: float) -> None:
        """After `seconds`, close the connection if `is_slow` returns True. Data that the client does not read are
        dropped.
        """

        def check() -> None:
            if is_slow():
                self.transport.close()
                self.loop.call_later(READ_SECONDS, self.transport.abort)

        self.loop.call_later(seconds, check)
