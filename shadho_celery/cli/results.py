"""Commands about recorded studies: `studies`, `show`, `trials`, `trial`, `best`, `export`, `report`, `rm`.

All commands except `rm` work while the study runs, because they read its store without a lock.
"""

from __future__ import annotations

import calendar
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import nsmallest
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.shared_options import FILE, STDOUT, moment, print_json
from shadho_celery.core.checks import one_line, unbroken
from shadho_celery.core.files import EMBEDDED
from shadho_celery.core.settings import UNNAMED
from shadho_celery.core.trial import COUNTED, TrialState, in_words
from shadho_celery.core.units import counted
from shadho_celery.errors import ServiceError, StudyLocked, UsageError
from shadho_celery.fleet import urls

if TYPE_CHECKING:
    from rich.table import Table

    from shadho_celery.results.report import StudyReport
    from shadho_celery.results.study import Deleted, StudyResults
    from shadho_celery.results.trial import TrialResult
    from shadho_celery.store.sql import SqlStore

#: number of trials that `trials` shows without --limit
LIMIT = 50

#: in a terminal with fewer columns than this, `trials` leaves out the machines
NARROW = 80

#: maximum number of reports that `trial` shows, the latest ones
REPORTS = 10

#: maximum number of trials for which `show` says which params matter, because for so many it takes about a second
MOST_EXPLAINED = 50_000

MIB = 2**20


@shared_options.command(
    "studies", "studies --user anna@lab7", "studies --json", "studies --store postgresql://me@db/searches"
)
@shared_options.user_option
@click.option("--usage", is_flag=True, help="Instead: slot hours and money of ended trials by user and month.")
@shared_options.store_option
@shared_options.json_option
def studies(user: str | None, *, usage: bool, store: str, as_json: bool) -> None:
    """List the studies of a store, the latest first."""
    from shadho_celery.results.study import StudyResults
    from shadho_celery.store.sql import SqlStore

    shared_options.warn_of_password("--store", store, "PGPASSWORD or ~/.pgpass")
    opened_store = SqlStore(store, read_only=True)
    if usage:
        _show_usage(_usage(opened_store, user, time.time()), as_json=as_json)
        return
    records = [each for each in opened_store.records() if user in (None, each.owner)]
    found = [StudyResults(opened_store, record) for record in records]
    if as_json:
        from shadho_celery.results.study import listed_json

        print_json({"studies": [*map(listed_json, found)]})
        return
    if not found:
        whose = "" if user is None else f" of user {one_line(user, 80)}"
        say(f"there is no study{whose} yet; begin one: shadho-celery run STUDY_FILE", err=True)
        return
    from shadho_celery.cli.tables import fact, last, number, print_table

    def row(each: StudyResults) -> Sequence[object]:
        state = f"{each.state} on {where}" if (where := each.running_on) else each.state
        counts = (each.count(*COUNTED), each.count(TrialState.FAILED))
        module = each.command[:60] or each.module or None
        return (each.name, each.owner, module, state, *counts, number(each.best_loss), moment(each.created_at))

    facts: list[Any] = [*map(fact, ("study", "owner", "module", "state"))]
    print_table([*facts, ">trials", ">failed", ">best loss", last("begun")], map(row, found))


def _usage(store: SqlStore, user: str | None, now: float) -> list[dict[str, Any]]:
    """Return the slot hours and the money of ended attempts by month (UTC) and owner, or of one `user`."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    since = min((each.created_at for each in store.records()), default=now)
    while since < now:
        year, month, *_ = time.gmtime(since)
        until = float(calendar.timegm((year + month // 12, month % 12 + 1, 1, 0, 0, 0)))
        for each in store.used(since, until):
            if user in (None, owner := each["owner"]):
                new = {"month": f"{year}-{month:02}", "owner": owner, "slot_hours": 0.0, "money": 0.0}
                row = found.setdefault((new["month"], owner), new)
                row["slot_hours"] += each["slot_seconds"] / 3600
                row["money"] += each["money"]
        since = until
    return [*found.values()]


def _show_usage(found: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json({"usage": found})
        return
    from shadho_celery.cli.tables import fact, print_table
    from shadho_celery.core.units import money

    columns: list[Any] = [*map(fact, ("month", "owner")), ">slot hours", ">money"]
    rows = (
        (u["month"], u["owner"] or None, f"{u['slot_hours']:.2f}", money(u["money"]) if u["money"] else None)
        for u in found
    )
    print_table(columns, rows)


@shared_options.command("show svm", "show svm --json")
@shared_options.study_argument
@shared_options.store_option
@shared_options.json_option
def show(name: str, store: str, as_json: bool) -> None:
    """Show a study as the end of a run does: its best trials, failures and warnings; also while it runs."""
    with shared_options.opened(store, name) as found:
        report = found.read_report()
        if as_json:
            from shadho_celery.results.study import study_json

            print_json(study_json(report))
        else:
            _show(report, found)


def _explain(found: StudyResults, *, has_workers: bool) -> None:
    """Print which params matter, and what one more worker would add if trials run on workers."""
    from shadho_celery.charts.registry import CHARTS
    from shadho_celery.charts.study import StudyData

    data = StudyData(found)
    for name in ["importance"] + ["one_more_worker"] * has_workers:
        if not (chart := CHARTS[name].draw(data)).empty:
            say(f"{chart.title}.")


def _show(report: StudyReport, found: StudyResults) -> None:
    from shadho_celery.cli import tables
    from shadho_celery.scheduler.executors import INLINE_CLASS

    record = report.record
    command = (record.module, record.name, report.store, tables.further_trials(report.asked, report.ended))
    resumed = tables.resume_command(*command) if record.module else f"minimize(..., study={record.name!r}, resume=True)"
    is_over = report.running_on is None and not record.is_simulated
    tables.summary(report, tables.make_console(), resumed if is_over else None)
    if report.ended <= MOST_EXPLAINED:
        _explain(found, has_workers={*report.classes} != {INLINE_CLASS})
    if in_force := {**report.in_force}:
        in_force |= {"objectives": in_words(report.objectives)} if report.objectives else {}
        in_force |= {"command": record.command} if record.command else {}
        in_force.pop("simulated", None)
        shown = {name: UNNAMED.get(name) if value is None else value for name, value in in_force.items()}
        said = ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None)
        say(f"settings: {said}")
    if report.warm_start:
        say(f"warm start: learned from {counted(report.warm_start, 'trial')} of earlier studies, not counted here")
    in_flight = report.counts[TrialState.QUEUED] + report.counts[TrialState.RUNNING]
    rest = ": its trials ran on no machine, and it cannot be resumed" if record.is_simulated else ""
    if report.state == "stopped" and report.asked:
        rest = f": {counted(max(0, report.asked - report.ended), 'trial')} left"
    running = f"{report.state} on {report.running_on}, {counted(in_flight, 'trial')} in flight"
    say(running if report.running_on else f"{report.state}{rest}")


@shared_options.command(
    "trials svm",
    "trials svm --failed",
    "trials svm --state running --state queued",
    "trials svm --class cpu --subspace kernel=rbf --sort seconds --limit 10",
    "trials svm --sort loss --json",
)
@shared_options.study_argument
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.lower() for state in TrialState if state is not TrialState.LOST], case_sensitive=False),
    help="Only trials in this state; may be repeated.",
)
@click.option("--failed", is_flag=True, help="Only failed trials, with their errors.")
@click.option("--class", "compute_class", metavar="NAME", help="Only trials of this compute class.")
@click.option("--subspace", metavar="NAME", help="Only trials of this subspace, such as kernel=rbf.")
@click.option(
    "--sort",
    type=click.Choice(["number", "loss", "seconds"]),
    default="number",
    show_default=True,
    help="Smallest number, best loss or most seconds first. By loss, feasible trials and higher budgets come first.",
)
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), help=f"Most trials to show.  [default: {LIMIT}; with --json all]"
)
@shared_options.store_option
@shared_options.json_option
def trials(
    name: str,
    *,
    states: tuple[str, ...],
    failed: bool,
    compute_class: str | None,
    subspace: str | None,
    sort: str,
    limit: int | None,
    store: str,
    as_json: bool,
) -> None:
    """List trials of a study, with the values that the objective got."""
    wanted = {TrialState(state.upper()) for state in states} | ({TrialState.FAILED} if failed else set())

    def fits(trial: TrialResult) -> bool:
        return (
            (not wanted or trial.state in wanted)
            and compute_class in (None, trial.compute_class)
            and subspace in (None, trial.subspace)
        )

    with shared_options.opened(store, name) as study:
        found, total = _chosen(study, fits, SORTED[sort], limit or (None if as_json else LIMIT))
        if as_json:
            from shadho_celery.results.study import trial_json

            print_json({"study": study.name, "trials": [trial_json(trial) for trial in found]})
            return
        if found:
            _print(_trials_table(found, with_errors=failed))
        more = f", of which {len(found)} are shown: see --limit" if total > len(found) else ""
        say(f"study {study.name}: {counted(total, 'trial') if found else 'no such trial'}{more}")


@shared_options.command("trial svm 3", "trial svm 3 --json")
@shared_options.study_argument
@click.argument("number", type=click.IntRange(min=0))
@shared_options.store_option
@shared_options.json_option
def trial(name: str, number: int, store: str, as_json: bool) -> None:
    """Show all that is known of trial NUMBER of a study, with the traceback of its failure."""
    with shared_options.opened(store, name) as study:
        found = study.trial(number)
        if as_json:
            from shadho_celery.results.study import attempt_json, reports_json, trial_json

            history = [attempt_json(each) for each in study.records.of_trial(number)]
            facts = {**trial_json(found), "folder": found.folder, "notes": study.notes(number)}
            print_json({"study": study.name, **facts, "history": history, "reports": reports_json(found)})
            return
        for line in _description(study, found):
            say(line)


@shared_options.command("best svm", "best svm --json > best.json")
@shared_options.study_argument
@shared_options.store_option
@shared_options.json_option
def best(name: str, store: str, as_json: bool) -> None:
    """Print the best trial of a study: its loss, and the values as the objective got them.

    Of several losses print all trials of the front, the feasible ones that no other one dominates.
    """
    with shared_options.opened(store, name) as study:
        front = study.front
        found = front[0] if front else study.best
        if as_json:
            from shadho_celery.results.study import trial_json

            whole = {"front": [*map(trial_json, front)]} if front else {"repeated": to_builtins(study.repeated)}
            print_json({"study": study.name, **trial_json(found), "folder": found.folder, **whole})
            return
        if front:
            _print(_trials_table(front, with_errors=False))
            say(f"study {study.name}: front of {counted(len(front), 'trial')}")
            return
        warned = "" if found.is_feasible else ", which breaks its constraints: no trial is feasible yet"
        at = "" if found.budget is None else f" at budget {found.budget:g}"
        named: Mapping[str, float | None] = found.losses or {"loss": found.loss}
        losses = ", ".join(f"{name} {loss!r}" for name, loss in named.items())
        seeds = "" if (known := study.repeated) is None else f"; {known.mean!r} is the {known.words}"
        say(f"study {study.name}, trial {found.number}: {losses}{at}{seeds}{warned}")
        for line in [
            *_listed("values", found.values),
            *_listed("constraints", found.constraints),
            *_listed("metrics", found.metrics),
            *_folder(study, found),
        ]:
            say(line)


#: sort key of trials by value of `trials --sort`
SORTED: Mapping[str, Callable[[TrialResult], Any]] = {
    "number": lambda trial: trial.number,
    "loss": lambda trial: trial.merit,
    "seconds": lambda trial: -(trial.seconds or 0.0),
}


def _chosen(
    study: StudyResults, fits: Callable[[TrialResult], bool], key: Callable[[TrialResult], Any], most: int | None
) -> tuple[list[TrialResult], int]:
    """Return the first `most` of the matching trials, sorted by `key`, and the number of all matching trials."""
    counter = count()
    fitting = (each for each in study.trials if fits(each) and next(counter) >= 0)
    # A study may have a million trials; `nsmallest` keeps only `most` of them in memory.
    found = sorted(fitting, key=key) if most is None else nsmallest(most, fitting, key=key)
    return found, next(counter)


def _trials_table(found: Sequence[TrialResult], *, with_errors: bool) -> Table:
    from shadho_celery.cli import tables

    where = ["class", "host"] if tables.make_console().width >= NARROW else []
    # The version of the code shows which failures occurred before the user fixed the code.
    code = ["code"] * (with_errors and len({each.code for each in found}) > 1)
    facts = [">trial", "state", *tables.RESULT, ">time", *where, *code]
    return tables.trial_table(found, *facts, "error" if with_errors else tables.GOT)


def _description(study: StudyResults, found: TrialResult) -> Iterator[str]:
    """Yield the lines that describe a trial, one fact per line."""
    from shadho_celery.cli.tables import note_lines
    from shadho_celery.core.units import took

    yield f"study {study.name}, trial {found.number}: {found.state.lower()}"
    yield from [f"command: {study.command}"] * bool(study.command)
    yield from note_lines(study.notes(found.number))
    if found.loss is not None and not found.losses:
        yield f"loss: {found.loss!r}"
    yield from _listed("losses", found.losses)
    yield from _listed("constraints", found.constraints)
    yield f"subspace: {unbroken(found.subspace)}"
    yield from _listed("values", found.values)
    yield from _listed("params as drawn", found.params)
    repeats = f", with the params of trial {found.origin} and another seed" if found.record.is_repeat else ""
    yield f"sampler: {found.sampler or 'not recorded'}{repeats}"
    yield from _listed("metrics", found.metrics)
    if found.budget is not None:
        yield from _on_rung(study, found, found.budget)
    if found.step is not None:
        what = "the loss is that of its last report" if found.loss is not None else "its last report is not a number"
        rule = study.in_force.get("pruner") or "a report"
        yield f"pruned by {rule}: {what}, at step {found.step}"
    yield f"seed: {found.seed}"
    if found.host:
        yield f"ran on: {found.host}, class {found.compute_class}"
    yield from _folder(study, found)
    yield from _attempts(study, found)
    yield f"asked: {moment(found.asked_at)}  started: {moment(found.started_at)}  ended: {moment(found.finished_at)}"
    if found.seconds is not None:
        yield f"time: {took(found.seconds)}"
    yield from _memory(found)
    if reports := found.reports:
        shown = f", the last {REPORTS}" if len(reports) > REPORTS else ""
        yield f"reports: {len(reports)}{shown}"
        name = next(iter(study.objectives), "loss")
        for report in reports[-REPORTS:]:
            told = ", ".join(f"{each} {loss:.6g}" for each, loss in (report.losses or {name: report.loss}).items())
            yield f"  attempt {report.attempt}, step {report.step}: {told}"
    if found.warning:
        yield f"warning: {found.warning}"
    if found.error and found.state == TrialState.CANCELLED:
        yield from [f"why: {found.error.rstrip()}"] if found.error != "cancelled" else []
    elif found.error:
        yield "error:"
        yield found.error.rstrip()
    if found.log:
        yield f"last lines of its output (more by: shadho-celery logs {study.name} {found.number}):"
        yield found.log


def _folder(study: StudyResults, found: TrialResult) -> Iterator[str]:
    """Yield a line on the folder that a trial has left. On a fleet, it is not known whether the trial left a folder."""
    from shadho_celery.scheduler.executors import HOST as IN_PROCESS

    if Path(found.folder).is_dir():
        yield f"folder: {found.folder}"
    elif found.host not in {None, IN_PROCESS} and not (EMBEDDED / study.key).is_dir():
        yield f"folder: {found.folder} below the working directory of its worker on {found.host}, if it has left files"


def _attempts(study: StudyResults, found: TrialResult) -> Iterator[str]:
    """Yield a line for each attempt of a trial, and lines on why the last one was placed on its class."""
    lost = f", {found.lost} of them lost" if found.lost else ""
    yield f"attempts: {found.attempts}{lost}; code: {found.code or 'not recorded'}"
    attempts = study.records.of_trial(found.number)
    yield from map(_attempt, attempts)
    if attempts:
        yield from _why_here(study, attempts[-1])


def _attempt(each: Mapping[str, Any]) -> str:
    """Return a line that says where an attempt ran and how it ended."""
    from shadho_celery.core.units import cost_of, money, took

    slot = "" if each["slot"] is None else f", slot {each['slot']}"
    where = f" ({each['host']}{slot})" if each["host"] else ""
    copy = " as a copy" if each["copy"] else ""
    state = each["end"] or ("running" if each["started_at"] is not None else "queued")
    begun = each["queued_at"] if each["started_at"] is None else each["started_at"]
    has_times = begun is not None and each["ended_at"] is not None
    after = f" after {took(max(0.0, each['ended_at'] - begun))}" if has_times else ""
    is_priced = each["price"] is not None and each["started_at"] is not None and has_times
    cost = f", cost {money(cost_of(each['price'], begun, each['ended_at']))}" if is_priced else ""
    return f"  attempt {each['attempt']} on {each['compute_class']}{where}{copy}: {state}{after}{cost}"


def _why_here(study: StudyResults, each: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the predictions for each class at the time of placement, and the reason for the chosen class."""
    from shadho_celery.charts.machines import free_slots, has_shadow_prices, reasons
    from shadho_celery.charts.study import StudyData
    from shadho_celery.core.units import took

    known = {name: placed for name, placed in each["placed"].items() if placed.seconds is not None}
    if not known:
        return
    words, has_prices = [], has_shadow_prices(known)
    for name, placed in sorted(known.items(), key=lambda item: item[1].seconds):
        price = f", shadow price {placed.price:.3g}" if placed.price is not None and has_prices else ""
        queue = f", queue {took(placed.backlog)}" if placed.backlog else ""
        words.append(f"{name} {took(placed.seconds)}{queue}{price}")
    yield f"  predicted when it was placed: {'; '.join(words)}"
    if has_prices:
        yield "  (shadow price: what a second of a class is worth to other trials, for the placement; not money)"
    free = free_slots(StudyData(study).attempts(), each["number"], each["attempt"])
    if why := [*reasons(each["placed"], each["compute_class"], free)]:
        yield f"  it went to {each['compute_class']} because {', and '.join(why)}"


def _on_rung(study: StudyResults, found: TrialResult, budget: float) -> Iterator[str]:
    """Yield a line on the budget of a trial, and a line on the trial that continues it on the next rung, if any."""
    rung = "" if found.rung is None else f", rung {found.rung}"
    yield f"budget: {budget:g}{rung}{_continuation(study, found)}"
    if (above := study.above(found)) is not None:
        yield f"promoted: to budget {above.budget:g}, as trial {above.number}"


def _continuation(study: StudyResults, found: TrialResult) -> str:
    """Return text that says whether a promoted trial has found the files of the trial that it continues, else ""."""
    if found.origin is None or found.rung is None:
        return ""
    below = study.below(found)
    number = found.origin if below is None else below.number
    if found.continued is None:
        return f", continues trial {number}"
    if not found.continued:
        return f", began anew: no checkpoint of trial {number} was there"
    before = None if below is None else below.host
    if not (before and found.host):
        return f", continued trial {number}"
    where = "on the same machine" if before == found.host else "from shared storage"
    return f", continued trial {number} {where}"


def _memory(found: TrialResult) -> Iterator[str]:
    """Yield lines on a trial's peaks of memory, and on the classes on which it ran out of memory."""
    for name, peak in (("memory", found.memory), ("GPU memory", found.gpu_memory)):
        if peak is not None:
            yield f"{name}: {peak / MIB:.1f} MiB at its peak"
    for compute_class, memory in found.outgrown:
        yield f"ran out of {memory.words} on: {compute_class}"


def _listed(title: str, found: Any) -> Iterator[str]:
    """Yield the lines of `found`: a title and one line for each item of a mapping, or one line for any other value."""
    if not isinstance(found, Mapping):
        yield f"{title}: {found!r}"
    elif found:
        yield f"{title}:"
        # A name with a line feed is escaped, because otherwise it could imitate other lines of this output.
        yield from (f"  {name if name.isprintable() else repr(name)}: {found[name]!r}" for name in found)


def _print(table: Table) -> None:
    from shadho_celery.cli.tables import make_console

    make_console().print(table)


def _csv(study: StudyResults, file: IO[bytes], *, plain: bool = False) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    study.write_csv(text, plain=plain)
    # Without `detach`, the binary file would be closed when `text` is freed.
    text.detach()


def _json(study: StudyResults, file: IO[bytes]) -> None:
    """Write the study as one JSON object. Trials are read from the store and written one by one."""
    from shadho_celery.results.study import plain_json, trial_json

    facts = {name: getattr(study, name) for name in ("owner", "module", "command", "seed", "space")}
    head = plain_json({"study": study.name, **facts, "notes": study.notes()})
    file.write(f'{json.dumps(head)[:-1]}, "trials": ['.encode())
    for place, trial in enumerate(study.trials):
        file.write(f"{',' if place else ''}\n{json.dumps(plain_json(trial_json(trial)))}".encode())
    file.write(b"\n]}\n")


def _parquet(study: StudyResults, file: IO[bytes]) -> None:
    try:
        study.dataframe().to_parquet(file, index=False)
    except ImportError:
        raise UsageError('parquet needs pyarrow; in the checkout: pip install -e ".[export]"') from None


WRITERS: Mapping[str, Callable[[StudyResults, IO[bytes]], None]] = {"csv": _csv, "json": _json, "parquet": _parquet}


@shared_options.command(
    "export svm -o trials.csv",
    "export svm --format json > trials.json",
    "export svm -o trials.parquet",
    more="""csv and parquet are tables with one row per trial, and one column per label and metric. parquet
needs pandas and pyarrow: pip install -e ".[export]" in the checkout
\b
A text in csv that begins with =, +, -, @, a tab or a carriage return gets an apostrophe in front, because
a spreadsheet would run it as a formula. A text that begins with an apostrophe gets another one.
--warm-start removes these apostrophes again; --plain writes none.
""",
)
@shared_options.study_argument
@click.option(
    "--format", "kind", type=click.Choice([*WRITERS]), help="Format of the file.  [default: by FILE's name, else csv]"
)
@click.option(
    "-o", "--output", type=FILE, default="-", metavar="FILE", help="File to write.  [default: standard output]"
)
@click.option("--plain", is_flag=True, help="Write texts in csv unchanged, for programs other than spreadsheets.")
@shared_options.store_option
def export(name: str, kind: str | None, output: Path, plain: bool, store: str) -> None:
    """Write all trials of a study to FILE, or to standard output."""
    ending = output.suffix[1:].lower()
    if kind is None and ending and ending not in WRITERS:
        raise UsageError(f"there is no format for names that end with .{ending}; give --format {', '.join(WRITERS)}")
    kind = kind or ending or "csv"
    if plain and kind != "csv":
        raise UsageError(f"--plain is for csv; leave it out for {kind}")
    write = partial(_csv, plain=True) if plain else WRITERS[kind]
    if output == STDOUT and kind == "parquet" and sys.stdout.isatty():
        raise UsageError("parquet is a binary format and cannot be shown in a terminal; give -o FILE")
    with (
        shared_options.opened(store, name) as study,
        shared_options.new_file(output, f"{counted(len(study.trials), 'trial')} of study {study.name}") as file,
    ):
        write(study, file)


@shared_options.command(
    "report svm",
    "report svm -o svm.html",
    "report svm --store postgresql://me@db/searches",
    more="""The file opens in any browser, without a network. It has at most 2 MB of data, whatever the size of the
study: of large studies, fewer marks are drawn, and each chart says by which rule.""",
)
@shared_options.study_argument
@click.option(
    "-o", "--output", type=FILE, default="report.html", show_default=True, metavar="FILE", help="File to write."
)
@shared_options.store_option
def report(name: str, output: Path, store: str) -> None:
    """Write a report with charts to FILE: one HTML file, also while the study runs."""
    # Imported here, because the charts take a third of a second to import.
    from shadho_celery.charts.report import report_html
    from shadho_celery.charts.study import StudyData

    with shared_options.opened(store, name) as study:
        text = report_html(StudyData(study))
        with shared_options.new_file(output, f"report of study {study.name}") as file:
            file.write(text.encode())


@shared_options.command("rm svm-3f2a", "rm svm-3f2a --yes")
@shared_options.study_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@shared_options.store_option
@shared_options.on_fleet
def rm(name: str, yes: bool, store: str) -> None:
    """Delete a study: its trials and reports, and its checkpoints, logs and state below this folder's .shadho.

    A running study cannot be deleted. Files on the disks of other machines are listed, not deleted. If a fleet is
    named, running trials of the study are stopped, and those that wait in its queues will not run.
    """
    with shared_options.opened(store, name, exactly=True) as study:
        if (where := study.running_on) is not None:
            raise StudyLocked(f"the scheduler on {where} runs study {study.name}; stop it first, with Ctrl-C there")
        if yes and study.name != name:
            raise UsageError(f"--yes needs the full name: {study.name}")
        question = f"Delete study {study.name} with its {counted(study.count(), 'trial')} from {study.store}?"
        if urls.is_fleet({}):
            # Imported here, because Celery's libraries take half a second to import, and read the environment.
            from shadho_celery.session.control import Control

            # If the fleet does not answer, the study is deleted nevertheless.
            with suppress(ServiceError):
                Control(store=store).check_owner(study.owner)
        if not yes:
            shared_options.confirm(question)
        deleted = study.delete()
    say(f"deleted: study {deleted.name} with {counted(deleted.trials, 'trial')}")
    for folder in deleted.folders:
        say(f"deleted: {folder}")
    for folder in deleted.left:
        say(f"not deleted: {folder}, which is a link, or belongs to another user")
    if deleted.hosts:
        say(
            f"not deleted: {deleted.folder_there} below the working directory of its workers, on "
            f"{', '.join(deleted.hosts)}; while they run, shadho-celery clean {deleted.key} deletes it"
        )
    if urls.is_fleet({}):
        _leave_fleet(deleted)


def _leave_fleet(deleted: Deleted) -> None:
    """Stop the trials of a deleted study on the fleet, or print why they continue."""
    # Imported here, because Celery's libraries take half a second to import, and read the environment.
    from shadho_celery.fleet.executor import remove

    try:
        remove(deleted.key, deleted.numbers)
    except ServiceError as error:
        say(f"Warning: the study's running and waiting trials on the fleet continue: {error}", err=True)
        return
    say("not deleted: messages of its trials in the fleet's queues, if there are any; workers refuse them")
