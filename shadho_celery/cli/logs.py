"""Command that prints the output of a trial: `logs`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import click

from shadho_celery.cli import connection_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.result_options import opened, store_option, study_argument
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.transport import urls

if TYPE_CHECKING:
    from shadho_celery.results.trial import TrialResult

#: seconds between two checks of a log with --follow, and seconds to wait for workers' answers
FOLLOW_SECONDS, ANSWER_SECONDS = 0.5, 10.0

#: number of latest attempts of a trial that are searched for a log
LATEST = 5


@click.command(
    epilog=f"""
\b
Examples:
  shadho-celery logs svm 3
  shadho-celery logs svm 3 --follow
  shadho-celery logs svm 3 --attempt 1
  {urls.REDIS}=redis://127.0.0.1/0 shadho-celery logs svm 3     # from the fleet's workers
"""
)
@study_argument
@click.argument("number", metavar="TRIAL", type=click.IntRange(min=0))
@click.option("-f", "--follow", is_flag=True, help="Go on until the trial ends.")
@click.option("--attempt", type=click.IntRange(min=1), help="Attempt of the trial.  [default: the last with output]")
@click.option("--raw", is_flag=True, help="Print it unchanged: control codes, which a terminal obeys, are not escaped.")
@store_option
@connection_options.options
def logs(
    name: str, number: int, *, follow: bool, attempt: int | None, raw: bool, store: str, **connection: str | None
) -> None:
    """Print the output of trial number TRIAL: all that it and its child processes have printed, logged and warned.

    The log is read from this folder, otherwise from the workers of the named fleet. Only the beginning and the end of a
    long log are kept.
    """
    named = connection_options.environment(**connection)
    os.environ.update(named)
    is_fleet = urls.is_fleet(named)
    with opened(store, name) as study, closing(Logs(study.key, is_fleet, is_raw=raw)) as found:
        trial = study.trial(number)
        if attempt is not None and attempt > trial.attempts:
            raise UsageError(f"trial {number} has {trial.attempts} attempts; give --attempt a smaller number")
        printed = False
        while True:
            wanted = [attempt] if attempt else [*range(trial.attempts, 0, -1)][:LATEST]
            printed |= found.show(trial, wanted)
            if not follow or trial.state.is_finished:
                break
            time.sleep(FOLLOW_SECONDS)
            # The trial is read before the log, so that the log of an ended trial is complete.
            trial = study.trial(number)
        if not printed:
            _explain(trial, found.missing(trial))


class Logs:
    """Logs of one study's trials: those in this folder, and those of the fleet's workers."""

    def __init__(self, study: str, is_fleet: bool, *, is_raw: bool = False) -> None:
        """`study` is the study's key. With `is_raw`, logs are printed unchanged."""
        self._study = study
        self._is_raw = is_raw
        self._is_fleet = is_fleet
        self._fleet: FleetLogs | None = None
        #: attempt that is shown, and the position in its log
        self._attempt = self._position = 0

    def show(self, trial: TrialResult, attempts: Iterable[int]) -> bool:
        """Print new output from the log of the first attempt in `attempts` that has a log. Return whether one has."""
        for attempt in attempts:
            after = self._position if attempt == self._attempt else 0
            if (found := self._read(trial, attempt, after)) is None:
                continue
            if attempt != self._attempt and (trial.attempts > 1 or self._attempt):
                say(f"attempt {attempt} of {trial.attempts}:", err=True)
            text, self._position = found
            self._attempt = attempt
            (partial(click.echo, color=True) if self._is_raw else say)(text, nl=False)
            return True
        return False

    def missing(self, trial: TrialResult) -> ServiceError | str:
        """Return why there is no log of a trial: an error, or that it has printed nothing."""
        if not trial.attempts:
            return f"trial {trial.number} has not been sent to a worker yet"
        if self._fleet is not None:
            return self._fleet.missing(trial)
        if trial.host in {None, socket.gethostname()}:
            return f"trial {trial.number} has printed nothing, or ran in another folder"
        return ServiceError(
            f"the log of trial {trial.number} is on {trial.host}; give --redis to ask the workers there, or run this "
            "command there in the workers' folder"
        )

    def close(self) -> None:
        """Close the connection to the fleet."""
        if self._fleet is not None:
            self._fleet.close()

    def _read(self, trial: TrialResult, attempt: int, after: int) -> tuple[str, int] | None:
        # Imported late, because `--help` needs none of it.
        from shadho_celery.core.folders import CHECKPOINTS
        from shadho_celery.runner.output import log_path, read_log

        path = log_path(CHECKPOINTS, self._study, trial.number, attempt)
        try:
            if (found := read_log(path, after)) is not None or not self._is_fleet:
                return found
        except OSError as error:
            raise UsageError(f"the log {path} cannot be read: {error.strerror}") from None
        self._fleet = self._fleet or FleetLogs(self._study)
        return self._fleet.read(trial, attempt, after)


class FleetLogs:
    """Logs of one study's trials on the disks of the fleet's workers."""

    def __init__(self, study: str) -> None:
        """`study` is the study's key. Raises ServiceError."""
        from shadho_celery.transport.logs import LogClient
        from shadho_celery.transport.redis import connect
        from shadho_celery.transport.registry import Registry, Worker
        from shadho_celery.transport.signing import Signer

        signer = Signer.configured()
        self._fingerprint = signer.fingerprint
        self._study = study
        self._redis = connect(urls.url(urls.REDIS))
        self._registry = Registry(self._redis, Worker, signer)
        self._client = LogClient(self._redis, signer)
        #: worker that had the log
        self._source: str | None = None
        #: number of live workers with another signing key; whether a worker with our key is on the trial's machine;
        #: whether a worker has answered
        self._strangers = 0
        self._is_on_host = self._has_answered = False

    def read(self, trial: TrialResult, attempt: int, after: int) -> tuple[str, int] | None:
        """Return a part of an attempt's log from the position `after`, and its end position, or None without a log.

        Raises ServiceError.
        """
        from shadho_celery.transport.redis import refusals

        with refusals():
            workers, self._has_answered = self._workers(trial), False
            asking = self._client.ask(workers, self._study, trial.number, attempt, after=after, seconds=ANSWER_SECONDS)
            for answer in asking:
                self._has_answered = True
                if answer.text is not None:
                    self._source = answer.worker
                    return answer.text, answer.end
        return None

    def missing(self, trial: TrialResult) -> ServiceError | str:
        """Return why no worker has the log of a trial."""
        number, host = trial.number, trial.host
        if self._strangers and not self._has_answered:
            return ServiceError(
                f"{self._strangers} workers sign with another key than this command, or only one side signs; give the "
                "fleet's --signing-key-file"
            )
        if not self._is_on_host:
            return ServiceError(
                f"no worker is live on {host}, where the log of trial {number} is; start one there in the same folder"
            )
        if not self._has_answered:
            return ServiceError(
                f"no worker on {host} has answered within {ANSWER_SECONDS:.0f} s; check that it runs, and try again"
            )
        return (
            f"trial {number} has printed nothing, or its worker on {host} ran in another folder than the current ones"
        )

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _workers(self, trial: TrialResult) -> Sequence[str]:
        """Return the workers to ask: the worker that had the log, else those on the trial's machine, else all."""
        announced = self._registry.living()
        living = {name: worker for name, worker in announced.items() if worker.key == self._fingerprint}
        self._strangers = self._registry.refused + len(announced) - len(living)
        if self._source in living:
            return [self._source]
        on_host = [name for name, worker in living.items() if worker.machine.host == trial.host]
        self._is_on_host = bool(on_host)
        # Any worker may have the log, because a disk may be shared.
        return on_host or [*living]


def _explain(trial: TrialResult, why: ServiceError | str) -> None:
    """Print why there is no log. For a failed trial, print the last lines, which were sent with its result."""
    if trial.log:
        say(f"{why}; the last lines of its output were sent with its result:", err=True)
        say(trial.log)
    elif isinstance(why, ServiceError):
        raise why
    else:
        say(why, err=True)
