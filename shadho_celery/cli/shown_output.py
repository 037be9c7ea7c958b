"""Output of embedded trials and log lines of their workers in the terminal of a run (`--show-output`, `--verbose`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from shadho_celery.core.folders import CHECKPOINTS
from shadho_celery.errors import UsageError
from shadho_celery.runner.output import log_path, read_log, unstamped
from shadho_celery.study.state import StudyState

#: seconds between two checks of the logs
LOOK_SECONDS = 0.1

#: seconds after the end of an attempt within which the end of its log is written
LAST_SECONDS = 0.5


class ShownOutput:
    """Prints new output in the logs of running attempts."""

    def __init__(self, study: StudyState, say: Callable[[str], None]) -> None:
        """`say` prints a text."""
        self._study = study
        self._say = say
        #: by trial and attempt: the position in its log, and the moment at which it was last seen running
        self._positions: dict[tuple[int, int], int] = {}
        self._seen_at: dict[tuple[int, int], float] = {}
        self._looked_at = 0.0

    def update(self) -> None:
        """Print new output.

        Call this in every turn of the scheduler's loop, because an attempt may start and end within one turn.
        """
        now = time.monotonic()
        for attempt in self._study.attempts:
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
        """Print the remaining output."""
        if self._seen_at:
            time.sleep(LAST_SECONDS / 2)
        for key in sorted(self._seen_at):
            self._print(*key)

    def _print(self, number: int, attempt: int) -> None:
        try:
            path = log_path(CHECKPOINTS, self._study.record.key, number, attempt)
            found = read_log(path, self._positions.get((number, attempt), 0))
        except (OSError, UsageError) as error:
            self._say(f"[{number}] its log cannot be read: {error}")
            return
        if found is None:
            return
        text, self._positions[number, attempt] = found
        if text:
            self._say("\n".join(f"[{number}] {line}" for line in unstamped(text).splitlines()))


class WorkerLines:
    """Prints the new lines in the logs of the embedded workers, each after its class, such as [cpu]."""

    def __init__(self, logs: Iterable[tuple[str, Path]], say: Callable[[str], None]) -> None:
        """`logs` are pairs of class and log file. Lines of earlier runs are not printed."""
        self._say = say
        self._positions = {(name, path): path.stat().st_size if path.exists() else 0 for name, path in logs}

    def update(self) -> None:
        """Print the new lines."""
        for (name, path), position in self._positions.items():
            with suppress(OSError), path.open("rb") as file:
                # The supervisor cuts a long log.
                file.seek(position if position <= path.stat().st_size else 0)
                content = file.read()
                lines = content[: content.rfind(b"\n") + 1]
                self._positions[name, path] = file.tell() - len(content) + len(lines)
                for line in lines.decode(errors="replace").splitlines():
                    self._say(f"[{name}] {line}")

    def close(self) -> None:
        """Print the remaining lines."""
        self.update()
