"""The command `status`, which shows the running studies and the workers of a fleet, or those of this folder."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import asdict

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.shared_options import moment
from shadho_celery.core.checks import listed, mask, one_line
from shadho_celery.core.files import LOCK, is_locked
from shadho_celery.core.hardware import Gpu, gpus_text
from shadho_celery.core.system import overridden
from shadho_celery.core.units import duration
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls

if TYPE_CHECKING:
    from shadho_celery.fleet.registry import Progress, Worker
    from shadho_celery.fleet.signing import Signer
    from shadho_celery.fleet.state import FleetState

#: seconds to wait for a study whose servers do not answer because it is starting or ending
PASSING_SECONDS = 3.0

#: heading of the column with the age of the announcement from which a row is made
AS_OF = "as of"

#: maximum number of trials shown for a worker; --json lists all
TRIALS = 8

NO_FLEET = (
    f"no study runs in this folder with its own workers, and no fleet is named; to see a fleet, give --broker and "
    f"--redis, or set {urls.BROKER} and {urls.REDIS}"
)


@shared_options.command(
    "status",
    f"{urls.BROKER}=amqp://127.0.0.1 {urls.REDIS}=redis://127.0.0.1/0 shadho-celery status",
    "status --url-file ~/fleet.urls",
    "status --url-file ~/fleet.urls --json",
    "status --user anna@lab7",
)
@shared_options.user_option
@shared_options.json_option
@shared_options.on_fleet
def status(user: str | None, as_json: bool) -> None:
    """Show the studies that run on a fleet, its workers with the trials in their slots, and its classes and queues.

    If no fleet is named, show the studies that run in this folder with their own workers (embedded mode).
    """
    places = places_of()
    for place in places if user is not None else ():
        place["studies"] = [each for each in place.get("studies", ()) if each["owner"] == user]
        place["uses"] = [each for each in place.get("uses", ()) if each["owner"] == user]
        names = {each["name"] for each in place["studies"]}
        for worker in place.get("workers", ()):
            worker["runs"] = [run for run in worker["runs"] if run["study"] in names]
    if as_json:
        shared_options.print_json(places[0] if places and "fleet" in places[0] else {"fleet": None, "embedded": places})
    elif places:
        for place in places:
            _show(place)
    else:
        say(NO_FLEET)
    if places and all("trouble" in place for place in places):
        raise SystemExit(ServiceError.exit_code)


def places_of() -> list[dict[str, Any]]:
    """Return the state of the fleet whose URLs are in the environment, as one JSON object.

    If no fleet is named, return an object for each study that runs in this folder with its own workers.
    """
    if urls.is_fleet({}):
        return [{"fleet": {"broker": mask(urls.url(urls.BROKER)), "redis": mask(urls.url(urls.REDIS))}} | _look()]
    from shadho_celery.embedded.embedded import running

    found = []
    for folder in running():
        place = _place(folder)
        deadline = time.monotonic() + PASSING_SECONDS
        while "trouble" in place and time.monotonic() < deadline and is_locked(folder / LOCK):
            # The study is starting or ending.
            time.sleep(0.1)
            place = _place(folder)
        if "trouble" not in place or is_locked(folder / LOCK):
            found.append(place)
    return found


def _place(folder: Path) -> dict[str, Any]:
    """Return a JSON object for the study with embedded workers in `folder`, or the reason why it cannot be read."""
    from shadho_celery.embedded.embedded import CONTROL_KEY, reached
    from shadho_celery.fleet.signing import Signer, read_keys

    place: dict[str, Any] = {"folder": str(folder)}
    try:
        with reached(folder) as named, overridden(named):
            return place | _look(Signer(*read_keys(folder / CONTROL_KEY)))
    except UsageError as error:
        return place | {"trouble": str(error)}
    except ServiceError as error:
        cause = one_line(error.__cause__)
        silence = f"its Redis does not answer ({cause}); see the logs there, or ask on the machine that runs it"
        # The error's own remedy is left out, because it is about the servers of a fleet.
        return place | {"trouble": str(error) if error.__cause__ is None else silence}


def _look(control: Signer | None = None) -> dict[str, Any]:
    """Return the fleet whose URLs are in the environment as a JSON object: studies, workers, classes and drains."""
    # Imported here, because Celery's libraries take half a second to import, and read the environment.
    from shadho_celery.fleet.state import read_fleet, who_knows

    fleet = read_fleet(control)
    wanted = fleet.wanted()
    by_class: dict[str, list[Worker]] = defaultdict(list)
    for worker in fleet.workers.values():
        by_class[worker.compute_class].append(worker)
    return {
        "studies": [
            {
                "key": key,
                "name": one_line(study.name or key, 255),
                "owner": study.owner or None,
                "state": "running" if study.progress is None else one_line(study.progress.state, 20),
                "weight": study.weight,
                "trials": None if study.progress is None else _numbers(study.progress),
                "wants": study.wants,
                "wanted_slots": fleet.wanted(study),
                "age": fleet.ages.get(key),
            }
            for key, study in sorted(fleet.studies.items(), key=lambda each: (each[1].name, each[0]))
        ],
        "uses": [use._asdict() for use in fleet.uses()],
        "workers": [_worker(name, worker, fleet) for name, worker in sorted(fleet.workers.items())],
        "refused": fleet.refused,
        "keys": who_knows(fleet.keys),
        "codes": {module: found for module, found in codes(fleet.workers).items() if len(found) > 1},
        "classes": {
            name: {
                "workers": len(by_class[name]),
                "quarantined": sum(worker.state == "quarantined" for worker in by_class[name]),
                "draining": sum(worker.draining for worker in by_class[name]),
                "slots": sum(worker.slots for worker in by_class[name]),
                "busy": sum(worker.busy for worker in by_class[name]),
                "wanted": wanted.get(name),
                "queue": fleet.waiting(name),
                "hosts": sorted({worker.machine.host for worker in by_class[name]}),
                "imports": sorted({module for worker in by_class[name] for module in worker.imports}),
                "accept_code": sum(worker.accepts_code for worker in by_class[name]),
            }
            for name in fleet.depths
        },
        "drained": [
            {"worker": place, **({"by": None, "at": None} if drain is None else asdict(drain))}
            for place, drain in fleet.drained.items()
        ],
    }


def _numbers(progress: Progress) -> dict[str, int | None]:
    """Return the numbers of a study's trials, such as the number of ended trials."""
    return {name: fact for name, fact in asdict(progress).items() if name not in {"state", "sendable_slots"}}


def _worker(name: str, worker: Worker, fleet: FleetState) -> dict[str, Any]:
    """Return a worker as a JSON object, with its running trials, the longest-running first.

    The data is from the worker's latest announcement, `age` seconds ago. Its trials may have ended since.
    """
    age = fleet.ages.get(name)
    told_at = time.time() - (age or 0.0)
    runs = [
        {
            "study": one_line(share.name or key, 255),
            "owner": fleet.studies[key].owner or None if key in fleet.studies else None,
            "trial": trial.number,
            "replica": trial.rank,
            "slots": trial.slots,
            "seconds": round(max(0.0, told_at - trial.started_at), 1),
            "expected": trial.expected,
        }
        for key, share in worker.studies.items()
        for trial in share.trials
    ]
    return {
        "name": name,
        "class": worker.compute_class,
        "host": worker.machine.host,
        "state": worker.state,
        "slots": worker.slots,
        "busy": worker.busy,
        "gpus": [
            {"id": one_line(gpu.id), "name": one_line(gpu.name), "memory": gpu.memory, "device": one_line(gpu.device)}
            for gpu in worker.machine.gpus_for(worker.compute_class)
        ],
        "price": worker.price,
        "usage": to_builtins(worker.usage),
        "ended": worker.ended,
        "age": age,
        "runs": sorted(runs, key=lambda run: -run["seconds"]),
    }


def codes(workers: Mapping[str, Worker]) -> dict[str, dict[str, list[str]]]:
    """Return hosts by study module and version of its code. The version is "" if the import of the module fails."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker in workers.values():
        for module, code in worker.codes.items():
            found[module][code.digest].add(worker.machine.host)
    return {module: {digest: sorted(hosts) for digest, hosts in each.items()} for module, each in found.items()}


def _show(found: Mapping[str, Any]) -> None:
    if "trouble" in found:
        say(f"{found['folder']}: {found['trouble']}", err=True)
        return
    place = f"embedded workers in {found['folder']}" if "folder" in found else None
    say(place or f"broker {found['fleet']['broker']}, Redis {found['fleet']['redis']}")
    _show_studies(found["studies"])
    if found["workers"]:
        _show_workers(found["workers"])
    if found["classes"]:
        _show_classes(found["classes"])
    else:
        say(f"no worker is live{'' if place else '; start one on a machine: shadho-celery worker --import my_study'}")
    for drain in found["drained"]:
        place = one_line(drain["worker"])
        by = f"by {one_line(drain['by'])} at {moment(drain['at'])}" if drain["by"] else "but Redis has lost its record"
        say(f"{place} is drained, {by}; shadho-celery undrain {shlex.quote(place)} lets it take trials again")
    for key, each in found["keys"].items():
        unknown = f"is unknown to {listed(each['unknown_to'], TRIALS)}" if each["unknown_to"] else "is known to all"
        say(f"key {key} signs for {len(each['signs_for'])}, and {unknown}")
    for module, versions in found["codes"].items():
        parts = (f"{digest or 'one that fails'} on {', '.join(hosts)}" for digest, hosts in versions.items())
        say(f"{module} has {len(versions)} versions of its code, but a study uses only one: {'; '.join(parts)}")
    if found["refused"]:
        say(
            f"announcements that are malformed or not signed with this machine's key: {found['refused']}; "
            "check --signing-key-file",
            err=True,
        )


def _show_studies(studies: Sequence[Mapping[str, Any]]) -> None:
    if not studies:
        say("no study runs")
        return
    from shadho_celery.cli.tables import print_table

    def row(study: Mapping[str, Any]) -> Sequence[object]:
        trials = study["trials"] or {}
        ended = f"{trials['ended']} of {trials['limit']}" if trials.get("limit") is not None else trials.get("ended")
        counts = (ended, trials.get("running"), trials.get("waiting"))
        return study["name"], study["owner"], study["state"], f"{study['weight']:.6g}", *counts, _ago(study["age"])

    columns = ("study", "owner", "state", ">weight", ">trials", ">running", ">waiting", f">{AS_OF}")
    print_table(columns, map(row, studies))


def _show_workers(workers: Sequence[Mapping[str, Any]]) -> None:
    from shadho_celery.cli.tables import last, print_table

    has_gpus = any(worker["gpus"] for worker in workers)

    def row(worker: Mapping[str, Any]) -> Sequence[object]:
        gpus = [gpus_text(Gpu(**gpu) for gpu in worker["gpus"])] * has_gpus
        numbers = (*map(worker.get, ("slots", "busy", "ended")), _ago(worker["age"]))
        return one_line(worker["name"]), *numbers, worker["state"], *gpus, _in_slots(worker["runs"])

    columns = ["worker", ">slots", ">busy", ">ended", f">{AS_OF}", "state", *["GPUs"] * has_gpus]
    print_table([*columns, last("trials in its slots, by study")], map(row, workers))


def _ago(age: float | None) -> str:
    """Return the age of an announcement as text; "-" if the announcement has expired meanwhile."""
    return "-" if age is None else f"{duration(age)} ago"


def _in_slots(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return text with the TRIALS longest-running trials, grouped by study, and the number of further trials."""
    by_study: dict[str, list[str]] = defaultdict(list)
    for run in runs[:TRIALS]:
        replica = "" if run["replica"] is None else f" replica {run['replica']}"
        by_study[run["study"]].append(f"{run['trial']}{replica} ({duration(run['seconds'])})")
    shown = "; ".join(f"{study}: {', '.join(trials)}" for study, trials in by_study.items())
    return shown + (f" and {len(runs) - TRIALS} more" if len(runs) > TRIALS else "")


def _show_classes(classes: Mapping[str, Mapping[str, Any]]) -> None:
    from shadho_celery.cli.tables import print_table

    figures = ["workers", "quarantined", "draining", "slots", "busy", "wanted", "queue"]
    rare = {"draining", "wanted"} - {name for facts in classes.values() for name, value in facts.items() if value}
    figures = [each for each in figures if each not in rare]
    rows = (
        (
            name,
            *map(facts.get, figures),
            ", ".join(facts["hosts"]),
            ", ".join([*facts["imports"], *["any that is shipped"] * bool(facts["accept_code"])]),
        )
        for name, facts in classes.items()
    )
    print_table(["class", *(f">{each}" for each in figures), "hosts", "modules"], rows)
