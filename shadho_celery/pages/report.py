"""The report of a study: one HTML file with a summary in words, its charts and its best trials."""

from __future__ import annotations

import time

from shadho_celery import __version__
from shadho_celery.core.checks import one_line
from shadho_celery.core.units import counted, digits, money, took
from shadho_celery.pages.document import Html, document, element, joined
from shadho_celery.pages.figures import figures_of
from shadho_celery.pages.payload import encoded
from shadho_celery.pages.reading import StudyData
from shadho_celery.pages.summary import summary, values_of
from shadho_celery.results.report import BEST

#: maximum number of labels in the table of the search space
MOST_LABELS = 200
_SCRIPTS = "The charts need JavaScript."


def report_html(data: StudyData) -> str:
    """Return the report of a study as the text of an HTML file, which needs no network."""
    figures = figures_of(data)
    words = [
        part
        for question, sentences in summary(data, figures)
        for part in (element("dt", question), *(element("dd", sentence) for sentence in sentences))
    ]
    body = joined(
        [
            heading(data),
            headline(data),
            element("section", element("h2", "Summary"), element("dl", joined(words), class_="summary")),
            element("main", element("noscript", _SCRIPTS), id="figures"),
            element("section", element("h2", "Best trials"), best_trials(data)),
            element("section", element("h2", "Search space"), _space(data)),
        ]
    )
    return document(f"{one_line(data.study.name)}: report", body, encoded(figures, data.classes))


def heading(data: StudyData) -> Html:
    """Return the line at the top: name, state and time of reading."""
    state = f"running on {data.report.running_on}" if data.report.running_on else data.report.state
    read = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(data.now))
    said = f"{one_line(state)}; read on {read} by shadho_celery {__version__}"
    return element("header", element("h1", one_line(data.study.name)), element("p", said), class_="bar")


def headline(data: StudyData) -> Html:
    """Return the few numbers that are looked at first."""
    report, best = data.report, data.study.best_loss
    name = next(iter(report.objectives), "loss")
    ended = "trial ended" if report.ended == 1 else "trials ended"
    numbers = {
        f"best {name}": "–" if best is None else digits(best),
        ended if report.asked is None else f"of {counted(report.asked, 'trial')} ended": f"{report.ended:,}",
        "of trials": took(report.active_seconds),
        **({"of money": money(sum(report.money.values()))} if report.money else {}),
    }
    pairs = [element("div", element("dt", one_line(key, 60)), element("dd", each)) for key, each in numbers.items()]
    return element("dl", *pairs, class_="headline")


def best_trials(data: StudyData) -> Html:
    """Return a table of the best trials."""
    names = ("trial", "loss", "seconds", "class", "values")
    kinds = dict.fromkeys(names[:3], "number")
    head = element("tr", *(element("th", name, scope="col", class_=kinds.get(name, "text")) for name in names))
    rows = []
    for trial in data.report.front[:BEST] or data.report.best_few:
        loss = next(iter(trial.losses.values()), trial.loss)
        cells = (
            str(trial.number),
            "–" if loss is None else digits(loss),
            took(trial.seconds),
            one_line(trial.compute_class or "–", 60),
            values_of(trial),
        )
        shown = (
            element("td", cell, data_label=name, class_=kinds.get(name, "text"))
            for name, cell in zip(names, cells, strict=True)
        )
        rows.append(element("tr", *shown))
    if not rows:
        return element("p", "No trial has a loss yet.", class_="empty")
    return element("table", element("thead", head), element("tbody", *rows), class_="cards")


def _space(data: StudyData) -> Html:
    domains = [*data.study.space.items()]
    rows = [
        element("tr", element("th", one_line(label), scope="row"), element("td", one_line(text)))
        for label, text in domains[:MOST_LABELS]
    ]
    more = len(domains) - len(rows)
    said = f" The first {MOST_LABELS} are listed." if more > 0 else ""
    return element(
        "details",
        element("summary", f"{counted(len(domains), 'label')} with distributions.{said}"),
        element("table", element("tbody", *rows)),
    )
