"""Lines of a worker's log about the worker itself. People wait for them, so they are written at any log level."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)


def tell(text: str) -> None:
    """Write a line to the log at any log level."""
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))


def ready(name: str, compute_class: str, slots: int, queues: Sequence[str], broker: str) -> str:
    """Return the line of a worker that is ready. `broker` is a URL without a password."""
    room = f"{slots} slot{'s' * (slots > 1)}"
    return f"{name} is ready. Class {compute_class}, {room}, queues {' and '.join(queues)} on {broker}"
