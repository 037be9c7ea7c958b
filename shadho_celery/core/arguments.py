"""Names of a run's arguments that are not settings, for messages: options of the command, or arguments in Python."""

from __future__ import annotations

from shadho_celery.errors import Words

RESUME = Words("--resume", "resume=True")
STUDY = Words("--study", "study=")
STORE = Words("--store", "store=")
SEED = Words("--seed", "seed=")
WARM_START = Words("--warm-start", "warm_start=")
#: the arguments that say where a study is kept and how it begins, by their names in Python
ARGUMENTS = {"store": STORE, "study": STUDY, "resume": Words("--resume", "resume="), "seed": SEED}


def resume(name: str) -> Words:
    """Return what a user writes to resume the study called `name`."""
    return Words(f"--resume {name}", "resume=True")


def repair(name: str) -> Words:
    """Return what a user writes to resume the damaged study called `name`. Python has no argument for that."""
    return Words(f"give --resume {name} --repair", f"run shadho-celery run with --resume {name} --repair")


def workers(compute_class: str, slots: int) -> Words:
    """Return what a user writes to start embedded workers with this number of slots of a class."""
    return Words(f"--workers {compute_class}={slots}", f'workers={{"{compute_class}": {slots}}}')
