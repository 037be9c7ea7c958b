"""Embedded workers of a run: their compute classes, and the number of slots of each."""

from __future__ import annotations

from collections.abc import Callable

from shadho_celery.core import hardware
from shadho_celery.core.settings import StudySettings


def default_workers(
    machine: hardware.Machine, settings: StudySettings, widest: int, *, is_demo: bool, say: Callable[[str], None]
) -> dict[str, int]:
    """Return the number of slots of the embedded workers, by class.

    With `is_demo`, each default class has a worker. `widest` is the number of slots of the widest trial.
    """
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
