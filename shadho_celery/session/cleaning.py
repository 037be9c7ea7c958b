"""Finds the folders of trials that no study of a store needs, and describes the answers of workers that delete them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from re import fullmatch

from shadho_celery.core.units import counted, size_text
from shadho_celery.errors import UsageError
from shadho_celery.fidelity.ladder import ladder_of
from shadho_celery.fleet.control import WorkerAnswer
from shadho_celery.results.study import StudyResults
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.keeper import Keeper, may_be_promoted

#: seconds to wait for the answers of workers, because a worker may have to look at many files
ANSWER_SECONDS = 60.0


#: by key of a study: its name, and the trials whose folders are not needed, as in `core.files`; None for all its files
Plan = Mapping[str, tuple[str, bytes | None]]


def plan(store: SqlStore, named: Sequence[str], running: Collection[str]) -> Plan:
    """Return the folders that the `named` studies do not need, or those of all studies of the store if none is named.

    `running` are the keys of running studies. These are left out, and so are studies that keep all folders. Raises
    UsageError if one of them is named, or a study that is neither in the store nor named by its key.
    """
    names = {record.key: record.name for record in store.records()}
    found: dict[str, tuple[str, bytes | None]] = {}
    for name in named or names:
        is_foreign = name not in {*names, *names.values()} and fullmatch("[0-9a-f]{16}", name)
        record = None if is_foreign else store.find(names.get(name, name))
        key = name if record is None else record.key
        refusal = ""
        if key in running or store.holder(key, time.time()) is not None:
            refusal = f"study {name} runs: its scheduler lets workers delete what it does not keep"
        elif record is not None and not record.in_force.get("keep"):
            refusal = f'study {name} needs all of its folders, because it has no STUDY["keep"]'
        if refusal and named:
            raise UsageError(refusal)
        if not refusal:
            found[key] = (name, None) if record is None else (record.name, _unneeded(StudyResults(store, record)))
    return found


def _unneeded(study: StudyResults) -> bytes:
    """Return the trials whose folders are not needed. The study does not run."""
    keeper, recorded, ladder = Keeper(study.in_force["keep"]["best"]), study.recorded, ladder_of(study.in_force)
    finished = [trial for trials, _ in recorded.trials.recall() for trial in trials]
    keeper.tell(finished)
    return keeper.unneeded(recorded, () if ladder is None else may_be_promoted(finished, ladder.most))


def lines(made: Plan, found: Mapping[str, WorkerAnswer | None], *, is_sure: bool) -> Iterator[str]:
    """Yield lines about what workers have deleted, or would delete. `found` has None for workers without an answer."""
    folders = size = 0
    for disk, swept in found.items():
        if swept is None or not swept.is_done:
            yield f"{disk} did not do it: see its log, and whether it obeys control with this command's signing key"
            continue
        for key, (count, of_them) in swept.swept.items():
            folders, size = folders + count, size + of_them
            if count:
                yield f"{disk}: {counted(count, 'folder')} of study {made[key][0]}, {size_text(of_them)}"
    done = "deleted" if is_sure else "to be deleted"
    yield f"{done}: {counted(folders, 'folder')}, {size_text(size)}" if folders else f"nothing {done}"
