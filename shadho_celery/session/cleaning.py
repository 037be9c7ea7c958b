"""Deletion of folders that no study of a store needs, on the disks of live workers or below this folder."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from re import fullmatch
from typing import NamedTuple

from msgspec.structs import replace

from shadho_celery.core.checks import listed
from shadho_celery.core.files import EMBEDDED, LOCK, STUDY_KEY, is_locked
from shadho_celery.core.units import counted, size_text
from shadho_celery.errors import UsageError
from shadho_celery.fidelity.ladder import ladder_of
from shadho_celery.fleet.control import TO_WORKERS, Client, Sweep, Swept, WorkerAnswer, of_worker
from shadho_celery.fleet.redis import Redis
from shadho_celery.fleet.registry import Worker, one_a_disk
from shadho_celery.fleet.signing import Signer
from shadho_celery.results.study import StudyResults
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.keeper import Keeper, may_be_promoted

#: seconds for which the answers of workers are awaited: each may have to look at many files
ANSWER_SECONDS = 60.0


class Plan(NamedTuple):
    """The studies whose folders are to be deleted."""

    #: by key: the trials whose folders are not needed, as in `core.folders`, or None for the whole study
    trials: dict[str, bytes | None]
    #: by key: name of the study, for all studies of the store
    names: Mapping[str, str]
    #: lines about studies that are left out
    notes: list[str]


def plan(store: SqlStore, named: Sequence[str], running: Collection[str]) -> Plan:
    """Return the plan for the `named` studies, or for all of the store if none is named.

    `running` are the keys of the studies that run anywhere. Raises UsageError for a study that is neither in the store
    nor named by its key.
    """
    records = [*store.records()]
    made = Plan({}, {record.key: record.name for record in records}, [])
    if named:
        records = []
        for name in named:
            if name in made.names or not fullmatch(STUDY_KEY, name):
                records.append(store.find(made.names.get(name, name)))
            elif name in running or is_locked(EMBEDDED / name / LOCK):
                raise UsageError(f"study {name} runs; stop it first")
            else:
                made.trials[name] = None
    for record in records:
        if record.key in running or store.holder(record.key, time.time()) is not None:
            made.notes.append(f"study {record.name} runs: its scheduler lets workers delete what it does not keep")
        elif keep := record.in_force.get("keep"):
            made.trials[record.key] = _unneeded(StudyResults(store, record), keep["best"])
        elif named:
            made.notes.append(f'study {record.name} needs all of its folders, because it has no STUDY["keep"]')
    return made


def _unneeded(study: StudyResults, best: int) -> bytes:
    """Return the trials of a study that does not run whose folders are not needed."""
    keeper, recorded, ladder = Keeper(best), study.recorded, ladder_of(study.in_force)
    finished = [trial for trials, _ in recorded.trials.recall() for trial in trials]
    keeper.tell(finished)
    return keeper.unneeded(recorded, () if ladder is None else may_be_promoted(finished, ladder.most))


def ask_workers(
    client: Redis, signer: Signer, by: str, workers: Mapping[str, Worker], sweep: Sweep
) -> dict[str, WorkerAnswer | None]:
    """Return the answers of workers, one for each disk; None for those without an answer. Raises redis-py's errors."""
    sender = Client(client, signer, TO_WORKERS)
    first = sender.request("", by, sweep)
    requests = {name: replace(first, to=of_worker(name)) for name in one_a_disk(workers)}
    sent = [request for request in requests.values() if sender.send(request) is not None]
    answers = {request.to: answer for request, answer in sender.answers(sent, ANSWER_SECONDS)}
    return {name: answers.get(of_worker(name)) for name in requests}


def lines(made: Plan, found: Mapping[str, WorkerAnswer | None], *, is_sure: bool) -> Iterator[str]:
    """Yield lines about what workers have deleted, or would delete."""
    folders = size = 0
    for disk, swept in found.items():
        if not isinstance(swept, Swept):
            yield f"{disk} did not answer: see its log"
            continue
        for key, (count, of_them) in swept.found.items():
            folders, size = folders + count, size + of_them
            if count:
                what = "the folder" if made.trials[key] is None else counted(count, "folder")
                yield f"{disk}: {what} of study {made.names.get(key, key)}, {size_text(of_them)}"
        yield from (f"{disk}: study {key} is left, because its trials run there" for key in swept.in_use)
        if others := {key: each for key, each in swept.others.items() if key not in made.names}:
            shown = listed([f"{key} ({size_text(each)})" for key, each in others.items()], 20)
            yield f"{disk}: left, because other stores may need them, unless you name them: {shown}"
    yield from made.notes
    done = "deleted" if is_sure else "to be deleted"
    yield f"{done}: {counted(folders, 'folder')}, {size_text(size)}" if folders else f"nothing {done}"
