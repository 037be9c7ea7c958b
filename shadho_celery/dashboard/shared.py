"""An answer that takes long and that many requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from shadho_celery.core.clock import Clock

T = TypeVar("T")

#: seconds for which an answer is kept
FRESH_SECONDS = 1.0


class Shared(Generic[T]):
    """Requests that come while the answer is being made, or just after, get the same one. For one event loop."""

    def __init__(self, make: Callable[[], T], threads: Executor, clock: Clock) -> None:
        """`make` is called in one of `threads`."""
        self._make, self._threads, self._clock = make, threads, clock
        #: the latest answer, with its time; it may be in the making
        self._latest: Future[tuple[float, T]] | None = None

    async def get(self) -> T:
        """Return the answer. Raises what `make` raises."""
        latest = self._latest
        if latest is None or self._is_old(latest):
            latest = self._latest = self._threads.submit(self._made)
        # If a request is cancelled, the others still wait.
        return (await asyncio.shield(asyncio.wrap_future(latest)))[1]

    def forget(self) -> None:
        """Let the next request get a new answer."""
        self._latest = None

    def _made(self) -> tuple[float, T]:
        made = self._make()
        return self._clock.now(), made

    def _is_old(self, latest: Future[tuple[float, T]]) -> bool:
        if not latest.done():
            return False
        return latest.exception() is not None or self._clock.now() - latest.result()[0] >= FRESH_SECONDS
