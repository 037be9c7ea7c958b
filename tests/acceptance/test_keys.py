"""The signing key of a fleet is replaced while its studies run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acceptance.commands import Desk, until
from integration.fleets import fleet

from shadho_celery.fleet.signing import KEY_FILE, Signer

pytestmark = pytest.mark.timeout(180)

OLD, NEW = "a key of more than sixteen bytes", "the next key of more than sixteen bytes"


class Machine:
    """A machine with a key file of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.key"
        self.environment = {KEY_FILE: str(self._file)}
        self.write(OLD)

    def write(self, *keys: str) -> None:
        new = self._file.with_suffix(".new")
        new.touch(0o600)
        new.write_text("".join(f"{key}\n" for key in keys))
        new.replace(self._file)


def known(desk: Desk, machine: Machine) -> dict[str, Any]:
    """Return the keys that `status` shows: who signs with each, and who does not know it."""
    found: dict[str, Any] = desk.told("status", "--json", **machine.environment).json()["keys"]
    return found


def test_a_key_is_rotated_while_two_studies_run_and_a_machine_is_off(
    tmp_path: Path, amqp_url: str, redis_url: str, unique: Callable[[str], str]
) -> None:
    """No attempt is lost or repeated, also while a file is half written. The machine follows its file, too."""
    old, new = (Signer(key.encode()).fingerprint for key in (OLD, NEW))
    with fleet(tmp_path / "fleet", amqp_url, redis_url, unique("cpu")) as made:
        desk = made.desk
        desk.study(seconds=0.1)
        machines = [Machine(tmp_path, name) for name in ("scheduler", "one", "two", "off")]
        scheduler, one, two, off = machines
        workers = [made.worker(2, **machine.environment) for machine in (one, two)]
        words = ("my_study", "--trials", "100000", "--study")
        studies = [desk.launch(*words, name, **scheduler.environment) for name in ("left", "right")]

        def is_so(holds: Callable[[dict[str, Any]], bool]) -> None:
            """Wait until `holds` is true of what `status` shows, and both studies go on."""
            until(lambda: holds(known(desk, scheduler)), 60, lambda: f"{known(desk, scheduler)} {desk.said()}")
            begun = {name: len(made.trials(name)) for name in ("left", "right")}
            until(lambda: all(len(made.trials(name)) > begun[name] + 2 for name in begun), 60, desk.said)

        is_so(lambda keys: len(keys.get(old, {"signs_for": ()})["signs_for"]) == 4)
        for machine in (scheduler, one):
            machine.write(OLD, NEW)
        until(lambda: len(known(desk, scheduler).get(new, {"unknown_to": ()})["unknown_to"]) == 1, 30, desk.said)
        scheduler.write(OLD, NEW[:5])
        until(lambda: all("stay in force" in study.err for study in studies), 30, desk.said)
        scheduler.write(OLD, NEW)
        told = desk.told("doctor", **scheduler.environment)
        assert (told.code, f"key {new} is unknown to {made.compute_class}@" in told.out) == (1, True), told.out
        two.write(OLD, NEW)
        is_so(lambda keys: keys[new] == {"signs_for": [], "unknown_to": []})
        for machine in (scheduler, one, two):
            machine.write(NEW, OLD)
        is_so(lambda keys: not keys[old]["signs_for"] and not keys[new]["unknown_to"])
        for machine in (scheduler, one, two):
            machine.write(NEW)
        is_so(lambda keys: keys.keys() == {new} and len(keys[new]["signs_for"]) == 4)
        late = made.worker(1, **off.environment)
        until(lambda: "keys that this worker does not know" in late.out + late.err, 60, desk.said)
        off.write(NEW)
        until(lambda: "this worker takes trials again" in late.out + late.err, 30, desk.said)
        until(lambda: ": COMPLETE, loss " in late.out + late.err, 30, desk.said)
        for name in ("left", "right"):
            assert desk.told("stop", name, **off.environment).code == 0
        for study in studies:
            assert study.wait(60).code == 0, desk.said()
        begun, ended = desk.runs(), desk.runs("ended")
        assert {attempt for _, attempt, *_ in begun} == {1}
        assert len(begun) == len(ended) == desk.states()["COMPLETE"]
        assert {trial["lost"] for trial in desk.trials()} == {0}
        # The studies warn of the announcements of the machine that was off.
        told = "\n".join(each.out + each.err for each in (*workers, late))
        assert "message was refused" not in told, told
