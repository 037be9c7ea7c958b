"""Output of embedded trials in the terminal of their run (`--show-output`): read from their logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from shadho_celery.core.folders import CHECKPOINTS
from shadho_celery.core.trial import Attempt
from shadho_celery.errors import UsageError
from shadho_celery.runner.trial_log import log_path, read_log, unstamped

#: seconds between two looks at the logs
LOOK_SECONDS = 0.1

#: seconds after the end of an attempt in which the end of its log is written
LAST_SECONDS = 0.5


class ShownOutput:
    """Prints what is new in the logs of the attempts that run."""

    def __init__(self, study: str, say: Callable[[str], None]) -> None:
        """`study` is the study's key; `say` prints a text."""
        self._study = study
        self._say = say
        #: by trial and attempt, the position in its log, and the moment at which it was last seen alive
        self._positions: dict[tuple[int, int], int] = {}
        self._seen_at: dict[tuple[int, int], float] = {}
        self._looked_at = 0.0

    def update(self, live: Iterable[Attempt]) -> None:
        """Print what is new; to be called in each turn, for an attempt may live no longer than one."""
        now = time.monotonic()
        for attempt in live:
            self._seen_at[attempt.number, attempt.attempt] = now
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        for key, seen_at in sorted(self._seen_at.items()):
            self._print(*key)
            if now - seen_at > LAST_SECONDS:
                del self._seen_at[key]
                self._positions.pop(key, None)

    def close(self) -> None:
        """Print the rest."""
        if self._seen_at:
            time.sleep(LAST_SECONDS / 2)
        for key in sorted(self._seen_at):
            self._print(*key)

    def _print(self, number: int, attempt: int) -> None:
        try:
            found = read_log(
                log_path(CHECKPOINTS, self._study, number, attempt), self._positions.get((number, attempt), 0)
            )
        except (OSError, UsageError) as error:
            self._say(f"[{number}] its log cannot be read: {error}")
            return
        if found is None:
            return
        text, self._positions[number, attempt] = found
        if text:
            self._say("\n".join(f"[{number}] {line}" for line in unstamped(text).splitlines()))
