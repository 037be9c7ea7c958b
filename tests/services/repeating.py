"""Work that goes on in a thread beside a test, such as the beats of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(call: Callable[[], object], seconds: float = 0.01) -> Iterator[None]:
    """Call a function again and again, until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
