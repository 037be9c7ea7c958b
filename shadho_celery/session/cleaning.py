"""The folders that no study of a store needs, and what workers say about their deletion."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from re import fullmatch
from typing import NamedTuple

from shadho_celery.core.files import STUDY_KEY
from shadho_celery.core.units import counted, size_text
from shadho_celery.fidelity.ladder import ladder_of
from shadho_celery.fleet.control import Swept, WorkerAnswer
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
    made = Plan({}, {record.key: record.name for record in store.records()}, [])
    for name in named or made.names:
        is_foreign = name not in made.names and fullmatch(STUDY_KEY, name)
        record = None if is_foreign else store.find(made.names.get(name, name))
        key = name if record is None else record.key
        if key in running or store.holder(key, time.time()) is not None:
            made.notes.append(f"study {name} runs: its scheduler lets workers delete what it does not keep")
        elif record is None:
            made.trials[key] = None
        elif keep := record.in_force.get("keep"):
            made.trials[key] = _unneeded(StudyResults(store, record), keep["best"])
        elif named:
            made.notes.append(f'study {name} needs all of its folders, because it has no STUDY["keep"]')
    return made


def _unneeded(study: StudyResults, best: int) -> bytes:
    """Return the trials of a study that does not run whose folders are not needed."""
    keeper, recorded, ladder = Keeper(best), study.recorded, ladder_of(study.in_force)
    finished = [trial for trials, _ in recorded.trials.recall() for trial in trials]
    keeper.tell(finished)
    return keeper.unneeded(recorded, () if ladder is None else may_be_promoted(finished, ladder.most))


def lines(made: Plan, found: Mapping[str, WorkerAnswer | None], *, is_sure: bool) -> Iterator[str]:
    """Yield lines about what workers have deleted, or would delete. `found` has None for workers without an answer."""
    yield from made.notes
    folders = size = 0
    for disk, swept in found.items():
        if not isinstance(swept, Swept):
            yield f"{disk} did not do it: see its log, and whether it obeys control with this command's signing key"
            continue
        for key, (count, of_them) in swept.found.items():
            folders, size = folders + count, size + of_them
            if count:
                yield f"{disk}: {counted(count, 'folder')} of study {made.names.get(key, key)}, {size_text(of_them)}"
    done = "deleted" if is_sure else "to be deleted"
    yield f"{done}: {counted(folders, 'folder')}, {size_text(size)}" if folders else f"nothing {done}"
