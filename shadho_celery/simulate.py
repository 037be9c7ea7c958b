"""Command that simulates a search on a described cluster: ``python -m shadho_celery.simulate cluster.py``."""

from __future__ import annotations

from shadho_celery.cli.interrupts import end_quietly

if __name__ == "__main__":
    end_quietly()

# The top level has only the imports that --help needs, because the modules of the simulation take a second to import.
import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.shared_options import FILE, option
from shadho_celery.core.settings import SETTINGS
from shadho_celery.errors import UsageError

if TYPE_CHECKING:
    from shadho_celery.simulation.simulation import Cluster, Simulation
    from shadho_celery.study.state import StudyState

#: text of the example of a cluster file; it is read, not imported, because the import would load hyperopt
EXAMPLE = (Path(__file__).parent / "simulation" / "example.py").read_text(encoding="utf-8")

#: number of turns of the scheduler's loop between two updates of the progress bar
TURNS = 500

COLUMNS = ("number", "subspace", "class", "slot", "start", "end", "state")


def _example(context: click.Context, _: object, wanted: bool) -> None:
    if wanted:
        say(EXAMPLE, nl=False)
        context.exit()


@shared_options.command(
    "python -m shadho_celery.simulate --example > cluster.py         # a file to start from",
    "python -m shadho_celery.simulate cluster.py",
    "python -m shadho_celery.simulate cluster.py --policy cost --policy paper --policy fifo",
    "python -m shadho_celery.simulate cluster.py --trials 2000 --shares promise --json",
    "python -m shadho_celery.simulate cluster.py --out trials.csv    # each trial's slot and times",
    "python -m shadho_celery.simulate cluster.py --store sqlite:///shadho.db    # then: shadho-celery dashboard",
    more="A cluster file, as --example prints it:\n"
    + "".join(f"  {line}\n" if line else "\b\n" for line in EXAMPLE.splitlines()),
)
@click.argument("cluster_file", metavar="CLUSTER_FILE")
@option(replace(SETTINGS["policy"], help="Places trials on classes; may be repeated."), multiple=True)
@option(replace(SETTINGS["shares"], shown_default="even; with --policy paper: paper"))
@option(SETTINGS["pool"])
@option(SETTINGS["place_by"])
@option(SETTINGS["deadline"])
@click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), help="Instead of the file's.")
@option(replace(SETTINGS["seconds"], help="Simulated seconds, instead of the file's."))
@option(replace(SETTINGS["trials"], help="Instead of the file's.", shown_default=""))
@click.option("-o", "--output", "--out", "out", type=FILE, help="Write the trials to this CSV file.")
@click.option("--store", metavar="URL", help="Keep the simulated studies in this store, for the dashboard and report.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per policy and nothing else.")
@click.option(
    "--example", is_flag=True, is_eager=True, expose_value=False, callback=_example, help="Print a cluster file."
)
@shared_options.refusals()
def main(
    cluster_file: str,
    *,
    policy: Sequence[str],
    seed: int | None,
    out: Path | None,
    store: str | None,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Simulate a search on the cluster described in CLUSTER_FILE, without any of its machines.

    The scheduler, its policies and its cost model are the real ones. Only the trials and the clock are simulated. The
    same seed gives exactly the same result.
    """
    from shadho_celery.simulation.simulation import load, simulate

    described = load(cluster_file)
    settings = {**described.settings, **{name: value for name, value in given.items() if value is not None}}
    described = replace(described, settings=settings)
    policies = policy or (settings.get("policy", SETTINGS["policy"].default),)
    if out == shared_options.STDOUT:
        raise UsageError("--out takes the name of a file; standard output shows the results")
    if out is not None and len(policies) > 1:
        raise UsageError("--out takes the trials of one policy; name one --policy")
    found, names = [], []
    # File and store are opened before the simulation starts, so that a wrong path or URL is reported at once.
    with (
        nullcontext() if out is None else _rows_file(out) as write,
        nullcontext() if store is None else _kept_in(store, described.name) as keep,
    ):
        for each in policies:
            with nullcontext(_ignore) if quiet else _progress(described, each) as on_turn:
                found.append(simulate(described, policy=each, seed=seed, on_turn=on_turn))
            names.append(keep(found[-1]) if keep is not None else None)
        if write is not None:
            write(found[0])
    if as_json:
        for result, name in zip(found, names, strict=True):
            facts = {fact: value for fact, value in vars(result).items() if fact not in {"study", "store", "plan"}}
            facts |= {"trials": result.trials, "balanced_an_hour": result.balanced_an_hour}
            say(json.dumps(facts | ({} if name is None else {"study": name})))
    else:
        _show(found)
        if store is not None:
            say("kept as " + ", ".join(map(str, names)))


def _ignore(_: StudyState) -> None:
    """Do nothing after a turn of the scheduler's loop, because no progress bar is shown."""


@contextmanager
def _progress(cluster: Cluster, policy: str) -> Iterator[Callable[[StudyState], None]]:
    """Show a progress bar in a terminal. Yield the function to call after each turn of the scheduler's loop."""
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    from shadho_celery.cli.tables import PrintableConsole

    console = PrintableConsole(stderr=True)
    if not console.is_terminal:
        yield _ignore
        return
    columns = ("{task.description}", BarColumn(), "{task.fields[trials]} trials", TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(policy, total=1.0, trials=0)
        turns = 0

        def on_turn(study: StudyState) -> None:
            nonlocal turns
            turns += 1
            if turns % TURNS == 0:
                seconds, trials = (cluster.settings.get(name) for name in ("seconds", "trials"))
                parts = [study.clock.now() / seconds if seconds else 0.0]
                parts += [study.counted / trials] if trials else []
                progress.update(task, completed=max(parts), trials=study.counted)

        yield on_turn


def _show(found: Sequence[Simulation]) -> None:
    """Print a table of subspaces for each policy, a table that compares the policies, and notices."""
    from rich.text import Text

    from shadho_celery.cli.tables import make_console, make_table
    from shadho_celery.core.units import money
    from shadho_celery.results.report import LATEST, preferences
    from shadho_celery.results.trial import Values
    from shadho_celery.simulation.simulation import an_hour

    console = make_console()
    for each in found:
        placed = ((name, each.complete[name], each.failed[name], *on.values()) for name, on in each.placed.items())
        columns = ("subspace", ">complete", ">failed", *(f">{name}" for name in each.utilisation))
        console.print(make_table(columns, placed, f"policy {each.policy}"))
        if each.policy == "cost":
            values = Values(each.study.record, each.plan.space)
            for preference in preferences(each.study.trials.latest(LATEST), values.outlined):
                console.print(Text(f"placed by {preference}"), soft_wrap=True)
    is_priced = any(each.money for each in found)
    names = ("policy", "trials", "per hour", "per hour in the space's mix", "utilised", "lost", "best loss", "after")
    is_left = any(each.interrupted > each.lost for each in found)
    rows = (
        [
            each.policy,
            each.trials,
            f"{an_hour(sum(each.complete.values()), each.seconds):.4g}",
            f"{each.balanced_an_hour:.4g}",
            ", ".join(f"{name} {part:.0%}" for name, part in each.utilisation.items()),
            each.lost,
            None if each.best is None else f"{each.best:.4g}",
            None if each.best_after is None else f"{each.best_after:.0f} s",
            *([each.interrupted] * is_left),
            *([money(sum(each.money.values()))] * is_priced),
        ]
        for each in found
    )
    console.print(make_table([*names, *["interrupted"] * is_left, *["money"] * is_priced], rows))
    for notice in dict.fromkeys(notice for each in found for notice in each.notices):
        console.print(Text(notice), soft_wrap=True)
    last = found[-1]
    console.print(
        f"{last.seconds:.0f} simulated seconds; {sum(each.cpu_seconds for each in found):.1f} s of CPU "
        f"({1e6 * last.cpu_seconds / max(1, last.trials):.0f} us per trial), {last.peak_mib:.0f} MiB at most"
    )


@contextmanager
def _kept_in(url: str, title: str) -> Iterator[Callable[[Simulation], str]]:
    """Open a store. Yield a function that writes a simulation to it and returns the name of its study."""
    from shadho_celery.simulation.simulation import keep
    from shadho_celery.store.sql import SqlStore

    shared_options.warn_of_password("--store", url, "PGPASSWORD or ~/.pgpass")
    with closing(SqlStore(url)) as store:
        yield lambda found: keep(found, store, title, time.time()).name


@contextmanager
def _rows_file(target: Path) -> Iterator[Callable[[Simulation], None]]:
    """Yield a function that writes the trials of a simulation to a CSV file. Raises UsageError."""
    with shared_options.new_file(target) as file, io.TextIOWrapper(file, newline="", encoding="utf-8") as text:
        writer = csv.writer(text)
        writer.writerow(COLUMNS)
        yield lambda found: writer.writerows(found.rows())


if __name__ == "__main__":
    main()
