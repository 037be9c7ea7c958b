"""Command that shows the fleet: `status`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from shadho_celery.cli import connection_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.result_options import json_option, print_json
from shadho_celery.core.checks import mask
from shadho_celery.transport import urls

if TYPE_CHECKING:
    from shadho_celery.transport.registry import Worker

NO_FLEET = (
    f"no fleet is named here: studies run on this machine alone, with workers of their own. To see a fleet give "
    f"--broker and --redis, or set {urls.BROKER} and {urls.REDIS}"
)


@click.command(
    epilog=f"""
\b
Examples:
  {urls.BROKER}=amqp://127.0.0.1 {urls.REDIS}=redis://127.0.0.1/0 shadho-celery status
  shadho-celery status --url-file ~/fleet.urls
  shadho-celery status --url-file ~/fleet.urls --json
"""
)
@json_option
@connection_options.options
@connection_options.refusals()
def status(as_json: bool, **connection: str | None) -> None:
    """Show the classes, workers, slots and queues of the fleet, with or without a study."""
    named = connection_options.environment(**connection)
    if not connection_options.is_fleet(named):
        if as_json:
            print_json({"fleet": None})
        else:
            say(NO_FLEET)
        return
    os.environ.update(named)
    # Late: Celery's libraries take half a second, and read the environment.
    from shadho_celery.transport.broker import depths, machine_queue
    from shadho_celery.transport.redis import connect, refusals
    from shadho_celery.transport.registry import Registry, StudyWants, Worker
    from shadho_celery.transport.signing import Signer

    client, signer = connect(urls.url(urls.REDIS)), Signer.configured()
    registry, wanting = Registry(client, Worker, signer), Registry(client, StudyWants, signer)
    with refusals():
        workers, studies = registry.living(), wanting.living()
    classes = {worker.compute_class for worker in workers.values()}
    classes |= {name for study in studies.values() for name in study.wants}
    queues = {name: {name} for name in sorted(classes)}
    for worker in workers.values():
        queues[worker.compute_class].add(machine_queue(worker.compute_class, worker.machine.host))
    waiting = depths({name for names in queues.values() for name in names})
    in_class = {name: _sum(waiting[each] for each in names) for name, names in queues.items()}
    found = _facts(workers, in_class, len(studies), registry.refused + wanting.refused)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _sum(depths: Iterable[int | None]) -> int | None:
    """Return the number of messages in queues, without those that there are not; None if there is none of them."""
    known = [depth for depth in depths if depth is not None]
    return sum(known) if known else None


def _facts(
    workers: Mapping[str, Worker], queues: Mapping[str, int | None], studies: int, refused: int
) -> dict[str, Any]:
    """Return the facts of the fleet, by class."""
    by_class: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers.values():
        by_class[worker.compute_class].append(worker)
    return {
        "fleet": {
            name: mask(urls.url(variable)) for name, variable in (("broker", urls.BROKER), ("redis", urls.REDIS))
        },
        "studies": studies,
        "refused": refused,
        "codes": {module: found for module, found in _codes(workers).items() if len(found) > 1},
        "classes": {
            name: {
                "workers": len(by_class[name]),
                "quarantined": sum(worker.quarantined for worker in by_class[name]),
                "slots": sum(worker.slots for worker in by_class[name]),
                "busy": sum(worker.busy for worker in by_class[name]),
                "queue": waiting,
                "hosts": sorted({worker.machine.host for worker in by_class[name]}),
                "imports": sorted({module for worker in by_class[name] for module in worker.imports}),
                "accept_code": sum(worker.accepts_code for worker in by_class[name]),
            }
            for name, waiting in queues.items()
        },
    }


def _codes(workers: Mapping[str, Worker]) -> dict[str, dict[str, list[str]]]:
    """Return the hosts by module and version of its code; a version is "" where the module cannot be imported."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker in workers.values():
        for module, code in worker.codes.items():
            found[module][code.digest].add(worker.machine.host)
    return {module: {digest: sorted(hosts) for digest, hosts in each.items()} for module, each in found.items()}


def _show(found: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from shadho_celery.cli.views import make_console, right

    say(f"broker {found['fleet']['broker']}, Redis {found['fleet']['redis']}; studies that run: {found['studies']}")
    if found["classes"]:
        figures = ("workers", "quarantined", "slots", "busy", "queue")
        table = Table("class", *map(right, figures), "hosts", "modules")
        for name, facts in found["classes"].items():
            cells = ("-" if facts[figure] is None else str(facts[figure]) for figure in figures)
            modules = [*facts["imports"], *(["any that is shipped"] if facts["accept_code"] else [])]
            table.add_row(Text(name), *cells, Text(", ".join(facts["hosts"])), Text(", ".join(modules)))
        make_console().print(table)
    else:
        say("no worker is live; start one on a machine: shadho-celery worker --import my_study")
    for module, versions in found["codes"].items():
        parts = (f"{digest or 'one that fails'} on {', '.join(hosts)}" for digest, hosts in versions.items())
        say(f"{module} has {len(versions)} versions of its code, and a study uses one: {'; '.join(parts)}")
    if found["refused"]:
        say(
            f"announcements that are not signed with this machine's key, or malformed: {found['refused']}; "
            "see --signing-key-file",
            err=True,
        )
