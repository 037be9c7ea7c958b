"""Embedded workers of a run, and the signals that end a run.

The servers and workers of a new study are started while its file and large libraries are imported (`start_early`).
Ctrl-C and SIGTERM are only recorded (`Signals`); the session handles them after a turn of its loop.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shadho_celery.core import hardware
from shadho_celery.core.files import EMBEDDED, below, new_key
from shadho_celery.core.settings import StudySettings, read_settings
from shadho_celery.embedded.embedded import Embedded
from shadho_celery.errors import ShadhoError
from shadho_celery.objective.study_file import literal_settings, module_name, refuse_libraries, refuse_nested

#: exit codes of a run that was stopped at once, as in shells: 128 plus the signal's number
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Signals:
    """Records the signals that arrive within a `with` block. The third signal ends the process at once."""

    def __init__(self) -> None:
        #: numbers of the signals that have arrived, in order
        self.noted: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in STOPPED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def are_urgent(self) -> bool:
        """True if the run must stop at once: after two signals, or after SIGTERM."""
        return len(self.noted) > 1 or signal.SIGTERM in self.noted

    @property
    def exit_code(self) -> int:
        """Exit code of a run that was stopped by the latest signal."""
        return STOPPED[signal.Signals(self.noted[-1])]

    def _note(self, number: int, _: object) -> None:
        self.noted.append(number)
        if len(self.noted) > 2:
            # The loop has not handled the earlier signals, perhaps because it waits for a server.
            raise SystemExit(self.exit_code)


def start_early(
    study: str,
    given: Mapping[str, Any],
    workers: Mapping[str, int],
    *,
    is_demo: bool = False,
    secret_urls: Sequence[str] = (),
) -> Embedded | None:
    """Start the embedded workers that a new study probably needs, judged by the text of its file. Do not wait for them.

    `study` is the module or path, and `given` are settings that override the file's. The workers do not get environment
    variables that contain a password of `secret_urls`. If the study does not begin, `Embedded.close` removes
    everything. Returns None if nothing can be started; the session then reports the reason.
    """
    if "hyperopt" in sys.modules:
        # The file can then be imported in an instant, so there is nothing to gain.
        return None
    try:
        module = module_name(study)
        refuse_nested(module)
        refuse_libraries([module])
        stated = literal_settings(module)
        if stated is None:
            return None
        machine, named = hardware.detect(), {**stated, **given}
        settings = read_settings({name: named[name] for name in ("cores", "classes", "slots", "gpus") if name in named})
        widest = settings.width[1] if isinstance(settings.width[1], int) else 1
        slots = workers or default_workers(machine, settings, widest, is_demo=is_demo, say=lambda _: None)
        with Signals() as signals:
            # A signal is handled only after the supervisor has received its plan, so that it can remove everything.
            directory = below(EMBEDDED, new_key())
            gpus = visible_gpus(machine, slots)
            fleet = Embedded(
                directory, slots, [module], machine.cores, gpus=gpus, is_early=True, secret_urls=secret_urls
            )
    except ShadhoError:
        return None
    for number in signals.noted:
        signal.raise_signal(number)
    return fleet


def default_workers(
    machine: hardware.Machine, settings: StudySettings, widest: int, *, is_demo: bool, say: Callable[[str], None]
) -> dict[str, int]:
    """Return the number of slots of the embedded workers, by class. Each kind of GPU has a class of its own.

    `widest` is the number of slots of the widest trial. If no kind of GPU is enough for it, but all GPUs together are,
    they form one class. With `is_demo`, each default class has a worker.
    """
    if is_demo:
        return dict.fromkeys(hardware.DEFAULT_CLASSES, widest)
    if gpus := len(machine.cards):
        cores = max(1, machine.cores - gpus)
        if widest > gpus:
            say(
                f"a trial takes {widest} slots, but this machine has {gpus} GPUs, one for each slot: such "
                "trials run in class cpu, without a GPU; for GPUs, give STUDY fewer slots, or start workers on more "
                "machines"
            )
        kinds = {name: len(own.cards) for name, own in machine.by_class().items()}
        if max(kinds.values()) < widest <= gpus:
            kinds = {machine.compute_class: gpus}
        return {**kinds, "cpu": cores if widest == 1 else widest}
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


def visible_gpus(machine: hardware.Machine, workers: Mapping[str, int]) -> dict[str, str]:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` for each worker that does not use all GPUs, by class.

    `workers` are the slots by class. A class for one kind of GPU uses the GPUs of this kind, unless it has more slots
    than these.
    """
    kinds = machine.by_class()
    own = [name for name, slots in workers.items() if name in kinds and slots <= len(kinds[name].cards)]
    return {name: kinds[name].visible for name in own if len(kinds) > 1}
