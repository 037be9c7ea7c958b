"""Arguments of a run besides its settings, as messages name them."""

from __future__ import annotations

from shadho_celery.errors import Words

RESUME = Words("--resume", "resume=True")
STUDY = Words("--study", "study=")
STORE = Words("--store", "store=")
SEED = Words("--seed", "seed=")
WARM_START = Words("--warm-start", "warm_start=")
#: those that say where a study is kept, by their names in Python
ARGUMENTS = {"store": STORE, "study": STUDY, "resume": Words("--resume", "resume="), "seed": SEED}


def resume(name: str) -> Words:
    """Return the words that resume the study of this name."""
    return Words(f"--resume {name}", "resume=True")


def repair(name: str) -> Words:
    """Return the words that resume a damaged study of this name: there is no argument of Python for it."""
    return Words(f"give --resume {name} --repair", f"run shadho-celery run with --resume {name} --repair")


def workers(compute_class: str, slots: int) -> Words:
    """Return the words that start this many slots of a class."""
    return Words(f"--workers {compute_class}={slots}", f'workers={{"{compute_class}": {slots}}}')
