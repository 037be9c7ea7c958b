"""The summary of a study in words, and its best trials."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from shadho_celery.charts.chart import Chart
from shadho_celery.core.checks import listed, one_line
from shadho_celery.core.objectives import in_words
from shadho_celery.core.settings import UNNAMED
from shadho_celery.core.units import counted, took
from shadho_celery.pages.advice import advice
from shadho_celery.pages.figures import Figure
from shadho_celery.pages.reading import StudyData
from shadho_celery.results.trial import TrialResult, given

#: maximum number of labels, classes and machines that are named; and of characters of a name, and of a trial's values
NAMED, VALUE, VALUES = 8, 40, 250
_NO_ADVICE = "Nothing stands out so far."


def summary(data: StudyData, figures: Sequence[Figure]) -> list[tuple[str, list[str]]]:
    """Return pairs of a question and the sentences that answer it. Long labels are short in them."""
    titles = {chart.name: chart.title for chart in _charts(figures) if not chart.empty}
    answers = [
        ("What was searched", [*_searched(data)]),
        ("On what", [*_on_what(data)]),
        ("What was found", [*_found(data, titles.get("importance"))]),
        (
            "How the machines were used",
            [f"{titles[name]}." for name in ("throughput", "timeline", "predictions") if name in titles]
            or ["No trial has completed yet."],
        ),
        ("What to try next", advice(data) or [_NO_ADVICE]),
    ]
    # The longest first, because a label may be a part of another one.
    long = sorted((label for label in data.study.space if len(label) > VALUE), key=len, reverse=True)
    return [(question, [_with_short(long, sentence) for sentence in sentences]) for question, sentences in answers]


def _with_short(labels: Iterable[str], sentence: str) -> str:
    for label in labels:
        sentence = sentence.replace(label, one_line(label, VALUE))
    return sentence


def values_of(trial: TrialResult) -> str:
    """Return what the objective got in one line."""
    return one_line(given(trial), VALUES)


def _searched(data: StudyData) -> Iterator[str]:
    study, labels = data.study, [*data.study.space]
    subspaces = len(data.report.subspaces)
    within = f" in {subspaces} subspaces" if subspaces > 1 else ""
    yield f"{counted(len(labels), 'label')}{within}: {listed([one_line(label, VALUE) for label in labels], NAMED)}."
    sampler = data.study.in_force.get("sampler") or UNNAMED["sampler"]
    yield f"The objective: {in_words(study.objectives)}. The sampler was {sampler}, the seed {study.seed}."


def _on_what(data: StudyData) -> Iterator[str]:
    report = data.report
    classes = [f"{one_line(name, VALUE)} ({counted(_ended(each), 'trial')})" for name, each in report.classes.items()]
    if not classes:
        yield "No trial has ended yet."
        return
    hosts = [one_line(host, VALUE) for host in report.hosts]
    yield f"{counted(len(classes), 'compute class', 'compute classes')}: {listed(classes, NAMED)}."
    yield f"{counted(len(hosts), 'machine')}: {listed(hosts, NAMED)}."
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(data.study.created_at))
    yield f"The study began at {since}; trials ran for {took(report.active_seconds)}."
    if report.money:
        yield f"{_upper(report.money_words)}."
    if report.deadline_words:
        yield f"{_upper(report.deadline_words)}."


def _found(data: StudyData, importance: str | None) -> Iterator[str]:
    best = data.report.best
    yield f"{_upper(data.report.best_words)}."
    if best is not None:
        yield f"Trial {best.number} has it: {values_of(best)}."
    if importance is not None:
        yield f"{importance}."
    if data.report.failures:
        yield f"Most frequent failure: {one_line(data.report.failures[0])}."


def _charts(figures: Iterable[Figure]) -> Iterator[Chart]:
    return (chart for figure in figures for _, chart in figure.charts)


def _ended(counts: object) -> int:
    return sum(getattr(counts, state) for state in ("complete", "pruned", "failed"))


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
