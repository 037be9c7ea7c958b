"""A TCP proxy on 127.0.0.1 that does what networks do: connections hang, are cut, are late or slow."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: closing a socket with this option set sends a reset
_RESET = struct.pack("ii", 1, 0)


class _Link:
    """One connection through the proxy, from the client and on to the server."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers
        #: True once nothing will ever pass again, although neither side is told
        self.dead = False
        self.cut = asyncio.Event()

    def reset(self) -> None:
        self.cut.set()
        for writer in self._writers:
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class Proxy:
    """Passes everything on to a port, from a thread of its own, until it is told otherwise; a context manager."""

    def __init__(self, target: int) -> None:
        self._target = target
        #: seconds by which everything is held up
        self.latency = 0.0
        #: bytes a second in each direction, which all connections share
        self.bandwidth = math.inf
        #: moment from which on each direction is free, by whether it is that to the server
        self._free = {True: 0.0, False: 0.0}
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def blackhole(self) -> None:
        """Let nothing pass, not even the end of a connection; connections can be made, and say nothing."""
        self._do(self._set(passing=False))

    def heal(self, *, half_open: bool = False) -> None:
        """Let everything pass again, also what was held back; with `half_open` only on new connections.

        Those that were there stay silent then, and neither side is told: as behind a firewall that has forgotten them.
        """
        self._do(self._set(passing=True, half_open=half_open))

    def reset(self) -> None:
        """Cut all connections; new ones can be made."""
        self._do(self._reset())

    def _do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _set(self, *, passing: bool, half_open: bool = False) -> None:
        for link in self._links:
            link.dead = link.dead or half_open
        if passing:
            self._passing.set()
        else:
            self._passing.clear()

    async def _reset(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _stop(self) -> None:
        self._server.close()
        await self._reset()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link = _Link(writer)
        try:
            server, onward = await asyncio.open_connection("127.0.0.1", self._target)
            link = _Link(writer, onward)
            self._links.add(link)
            await asyncio.gather(
                self._pump(link, reader, onward, inward=True), self._pump(link, server, writer, inward=False)
            )
        except (OSError, asyncio.CancelledError):
            pass  # the server cannot be reached, or we stop: the client is told
        finally:
            self._links.discard(link)
            self._tasks.discard(task)
            link.reset()

    async def _pump(
        self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, inward: bool
    ) -> None:
        try:
            while True:
                data = await source.read(65536)
                now = self._loop.time()
                self._free[inward] = max(now, self._free[inward]) + len(data) / self.bandwidth
                await asyncio.sleep(self.latency + self._free[inward] - now)
                await self._passing.wait()
                if link.dead:
                    await link.cut.wait()
                if not data:
                    sink.close()
                    return
                sink.write(data)
                await sink.drain()
        except OSError:
            link.reset()
