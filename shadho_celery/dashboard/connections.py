"""Connections to the dashboard: their number is limited, so a client that is slow must not keep one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol

#: seconds for which a client may take to send the head of a request, then its body (at most a megabyte), and to read
#: an answer that does not fit in the system's buffers
HEAD_SECONDS, BODY_SECONDS, READ_SECONDS = 5.0, 10.0, 60.0


class PromptProtocol(H11Protocol):
    """uvicorn's protocol, which closes the connection of a slow client. uvicorn itself closes only silent ones."""

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
        # A client that sends several requests at once may have begun the next one.
        self._close_if(lambda: self.cycle is answered, HEAD_SECONDS)

    def pause_writing(self) -> None:
        super().pause_writing()
        unread = self.cycle
        self._close_if(lambda: self.cycle is unread and self.flow.write_paused, READ_SECONDS)

    def _close_if(self, is_slow: Callable[[], bool], seconds: float) -> None:
        """Close the connection after some seconds if the client `is_slow` then; what it does not read is dropped."""

        def check() -> None:
            if is_slow():
                self.transport.close()
                self.loop.call_later(READ_SECONDS, self.transport.abort)

        self.loop.call_later(seconds, check)
