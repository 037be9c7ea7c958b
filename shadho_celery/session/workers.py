"""Workers of a run on this machine: which classes they play, with how many slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shadho_celery.core import hardware
from shadho_celery.core.folders import EMBEDDED, below
from shadho_celery.core.settings import StudySettings
from shadho_celery.embedded.embedded import Embedded
from shadho_celery.errors import UsageError
from shadho_celery.transport.celery_settings import file_of_folder


def start_embedded(
    key: str,
    module: str,
    settings: StudySettings,
    widest: int,
    given: Mapping[str, int],
    *,
    is_demo: bool,
    say: Callable[[str], None],
) -> Embedded:
    """Start the workers of a study, with the slots by class that are `given`, else with those of this machine.

    `key` is the study's, and `widest` the slots of its widest trial. With `is_demo` all default classes are played.
    Raises UsageError if no class has the slots of that trial.
    """
    if file := file_of_folder():
        say(f"{file} is not read: on this machine alone a study has a broker and workers of its own")
    machine = hardware.detect()
    workers = given or _default_workers(machine, settings, widest, is_demo=is_demo, say=say)
    if max(workers.values()) < widest:
        raise UsageError(
            f"STUDY['slots'] gives a trial {widest} slots of one class, and no class has as many here; "
            f"give --workers {next(iter(workers))}={widest}"
        )
    return Embedded(below(EMBEDDED, key), workers, [module], machine.cores)


def _default_workers(
    machine: hardware.Machine, settings: StudySettings, widest: int, *, is_demo: bool, say: Callable[[str], None]
) -> dict[str, int]:
    """Return the slots by class of the workers where none are given."""
    if is_demo:
        return dict.fromkeys(hardware.DEFAULT_CLASSES, widest)
    if machine.gpus:
        cores = max(1, machine.cores - len(machine.gpus))
        return {machine.compute_class: len(machine.gpus), "cpu": cores if widest == 1 else widest}
    if widest > 1:
        return {machine.compute_class: max(widest, machine.cores)}
    slots = machine.slots_for("cpu", settings.cores)
    if names := settings.classes:
        say(
            f"no GPU here: CPU workers stand in for the classes {', '.join(names)}, one slot each, so that you can "
            f"see the placement; a study without classes, or --workers cpu={slots}, uses all cores as class cpu"
        )
        return dict.fromkeys(names, 1)
    return {"cpu": slots}
