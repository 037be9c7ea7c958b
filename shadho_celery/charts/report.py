"""The report of a study as an HTML file, the rules of its advice, its display in a notebook, and functions for HTML.

The report has a summary in words, advice, charts and the best trials. Each rule of the advice ("what to try next") is a
function that yields sentences about a study, or none if it does not apply. HTML is made by `element`, which escapes its
content. A `document` contains its scripts and data, so it needs no network.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path

import numpy as np

from shadho_celery import __version__
from shadho_celery.charts.chart import Chart
from shadho_celery.charts.losses import failures, failures_by_label
from shadho_celery.charts.machines import one_more_worker
from shadho_celery.charts.params import scaled
from shadho_celery.charts.registry import CHARTS
from shadho_celery.charts.study import Figure, StudyData, encoded, figures_of
from shadho_celery.core.checks import listed, one_line, printable, short
from shadho_celery.core.settings import UNNAMED
from shadho_celery.core.trial import COUNTED, in_words, shown_limit
from shadho_celery.core.units import counted, digits, money, took
from shadho_celery.results.report import BEST
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult, given

#: least number of rated trials for advice about labels and progress
LEAST_TRIALS = 20
#: number of best trials that must all lie near one end of a range; fraction of the range that counts as near an end
COMPARED, END = 3, 0.05
#: failures are mentioned if at least this share of the trials failed
MANY_FAILED = 0.1
#: the search still makes progress if the best trial is in this share of the latest trials
LATEST = 0.2
#: beginnings of the descriptions of domains without bounds
_ENDLESS = ("normal(", "lognormal(", "qnormal(", "qlognormal(")


def advice(data: StudyData) -> list[str]:
    """Return sentences about what to try next, the most urgent first."""
    return [sentence for rule in RULES for sentence in rule(data)]


def many_failures(data: StudyData) -> Iterator[str]:
    """If many trials fail, yield the most frequent failure and the params that explain it.

    Trials under earlier code do not count.
    """
    trials = data.trials()
    failed = int(((trials.failure.codes >= 0) & trials.is_current).sum())
    ended = int((trials.state.is_in(*COUNTED) & trials.is_current).sum())
    if failed and failed >= MANY_FAILED * ended:
        where = failures_by_label(trials)
        yield f"{failures(trials).title}."
        if where.empty:
            yield "Fix the cause of the failures."
        else:
            yield f"{where.title}: fix the cause, or exclude such params from the space."


def best_at_an_end(data: StudyData) -> Iterator[str]:
    """If the best trials have values at one end of a label's range, say that a wider range may be better.

    This is not certain: an adaptive sampler draws trials near the best one in all labels, even in labels without
    effect.
    """
    trials, space = data.trials(), data.study.space
    rated = np.flatnonzero(trials.is_rated)
    if len(rated) < LEAST_TRIALS:
        return
    order = rated[np.argsort(trials.merit[rated], kind="stable")]
    for label in trials.labels.values():
        best = order[label.is_active[order]][:COMPARED]
        if (
            label.options
            or len(best) < COMPARED
            or best[0] != order[0]
            or space.get(label.name, "").startswith(_ENDLESS)
        ):
            continue
        # With few different values, such as numbers of layers, the best trials often lie at an end by chance.
        if len(np.unique(label.values[label.is_active])) <= LEAST_TRIALS / 2:
            continue
        places = scaled(label, label.values)[best]
        for is_near, end in ((places <= END, "lower"), (places >= 1 - END, "upper")):
            if is_near.all():
                value = digits(float(label.values[order[0]]))
                yield (
                    f"The best trials have {label.name} at the {end} end of its range ({value}): "
                    "a wider range may have better ones."
                )


def progress(data: StudyData) -> Iterator[str]:
    """Say that more trials may help if the best trial is one of the latest, or that there is no progress."""
    trials = data.trials()
    rated = np.flatnonzero(trials.is_rated)
    if len(rated) < LEAST_TRIALS:
        return
    best = int(rated[np.argmin(trials.merit[rated])])
    if best >= (1 - LATEST) * len(trials):
        how = f" (shadho-celery resume {data.study.name} --trials {2 * len(trials)})"
        yield (
            f"The best trial, {trials.number[best]}, is one of the latest: more trials may find a better one"
            f"{'' if data.study.is_simulated else how}."
        )
    elif still := data.report.still_words:
        yield f"{still[:1].upper()}{still[1:]}."


def another_worker(data: StudyData) -> Iterator[str]:
    """Say which class would complete the most trials with one more worker, if there are several classes and machines.

    A short study gets no such advice, because start-up and sending take most of its time.
    """
    trials, attempts = data.trials(), data.attempts()
    is_fleet = len(trials.compute_class.names) > 1 and len(trials.host.names) > 1
    if is_fleet and not (chart := one_more_worker(trials, attempts)).empty:
        yield f"{chart.title}."


#: rules in the order of their sentences
RULES: tuple[Callable[[StudyData], Iterator[str]], ...] = (
    many_failures,
    best_at_an_end,
    progress,
    another_worker,
)


#: maximum number of labels, classes or machines in a sentence; maximum number of characters of a name, and of a trial's
#: values
NAMED, VALUE, VALUES = 8, 40, 250
_NO_ADVICE = "Nothing stands out so far."


def summary(data: StudyData, figures: Sequence[Figure]) -> list[tuple[str, list[str]]]:
    """Return pairs of a question and the sentences that answer it. Long labels are shortened."""
    charts = (chart for figure in figures for _, chart in figure.charts)
    titles = {chart.name: chart.title for chart in charts if not chart.empty}
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
    # The longest labels are replaced first, because a label may be part of a longer label.
    long = sorted((label for label in data.study.space if len(label) > VALUE), key=len, reverse=True)
    for label in long:
        answers = [(asked, [each.replace(label, one_line(label, VALUE)) for each in said]) for asked, said in answers]
    return answers


def values_of(trial: TrialResult) -> str:
    """Return the values that the objective of a trial got, in one line."""
    return one_line(given(trial), VALUES)


def _searched(data: StudyData) -> Iterator[str]:
    study, labels = data.study, [*data.study.space]
    subspaces = len(data.report.subspaces)
    within = f" in {subspaces} subspaces" if subspaces > 1 else ""
    yield f"{counted(len(labels), 'label')}{within}: {listed([one_line(label, VALUE) for label in labels], NAMED)}."
    if data.study.command:
        yield f"The command: {one_line(data.study.command, VALUES)}."
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


def _ended(counts: object) -> int:
    return sum(getattr(counts, state) for state in ("complete", "pruned", "failed"))


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


#: folder of scripts and styles
STATIC = Path(__file__).parent / "static"
#: scripts of pages; each comes after the scripts that it imports
MODULES = ("numbers.js", "theme.js", "marks.js", "table.js", "draw.js", "timeline.js", "figure.js", "page.js")

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:function|const|class) (\w+))", re.MULTILINE)


class Html(str):
    """Text that is HTML, so `element` does not escape it."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: str | int) -> Html:
    """Return an element. Content that is not `Html` is escaped. Values of attributes are always escaped.

    Control characters, and characters that reverse the direction of text, are shown as escapes, except in `Html`. An
    underscore at the end of an attribute's name is left out, and others become hyphens: ``class_``, ``data_label``.
    """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(each)}"' for key, each in attributes.items())
    inner = "".join(each if isinstance(each, Html) else _text(each) for each in content)
    return Html(f"<{name}{given}>{inner}</{name}>")


def joined(parts: list[Html]) -> Html:
    """Return several elements as one text."""
    return Html("".join(parts))


def document(title: str, body: Html, data: bytes, *, is_embedded: bool = False) -> Html:
    """Return an HTML file that contains its scripts, styles and data.

    `data` is JSON without the character <. The Content-Security-Policy of the file allows only these scripts, by their
    hashes, and no request. A page that `is_embedded` in another page has no margins, and its script and data are
    compressed.
    """
    scripts = [whole_script(), _UNPACK] if is_embedded else [whole_script()]
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>',
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        element("title", title),
        f"<style>{style}</style>",
    ]
    content = [
        body,
        f'<script type="application/json" id="data">{data.decode()}</script>',
        f'<script type="module">{scripts[0]}</script>',
    ]
    if is_embedded:
        content[1:] = [
            f'<script type="text/plain" data-type="application/json">{_packed(data)}</script>',
            f'<script type="text/plain" data-type="module">{_packed(scripts[0].encode())}</script>',
            f'<script type="module">{_UNPACK}</script>',
        ]
    marked = ' class="embedded"' if is_embedded else ""
    return Html("\n".join([*head, f"</head>\n<body{marked}>", *content, "</body>\n</html>\n"]))


#: module that unpacks a page's data and script, and runs the script
_UNPACK = """
for (const packed of document.querySelectorAll("[data-type]")) {
  const bytes = Uint8Array.from(atob(packed.textContent), (each) => each.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const found = { type: packed.dataset.type, textContent: await new Response(unpacked).text() };
  packed.replaceWith(Object.assign(document.createElement("script"), found));
}
"""


@cache
def whole_script() -> str:
    """Return ECharts and our modules as one script, because a page is a single file. Each module has its own scope."""
    parts = [(STATIC / "vendor" / "echarts" / "echarts.min.js").read_text(encoding="utf-8"), "const modules = {};"]
    for name in MODULES:
        text = (STATIC / name).read_text(encoding="utf-8")
        exported = ", ".join(_EXPORT.findall(text))
        text = _IMPORT.sub(r'const \1 = modules["\2"];', _EXPORT.sub("", text))
        parts.append(f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();')
    return _harmless("\n".join(parts))


def _packed(text: bytes) -> str:
    return base64.b64encode(gzip.compress(text, mtime=0)).decode()


def _harmless(script: str) -> str:
    """Return the script. Raises ValueError if it cannot stand in an HTML file, because it would end its element."""
    if "\r" in script or re.search(r"</script|<!--", script, re.IGNORECASE):
        raise ValueError("this script cannot stand in an HTML file")
    return script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _value(value: str | int) -> str:
    # Attributes are written in ASCII. An attribute may contain a page with its scripts, and another encoding of the
    # notebook would change these scripts and so their hashes.
    found = escape(value) if isinstance(value, Html) else _text(str(value))
    return found.encode("ascii", "xmlcharrefreplace").decode()


def _text(text: str) -> str:
    return escape(printable(text))


#: maximum number of labels in the table of the search space
MOST_LABELS = 200
_SCRIPTS = "The charts need JavaScript."


def report_html(data: StudyData) -> str:
    """Return the report of a study as the text of an HTML file."""
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
    """Return the line at the top of the report: the study's name, its state, and the time of reading."""
    state = f"running on {data.report.running_on}" if data.report.running_on else data.report.state
    read = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(data.now))
    said = f"{one_line(state)}; read on {read} by shadho_celery {__version__}"
    return element("header", element("h1", one_line(data.study.name)), element("p", said), class_="bar")


def headline(data: StudyData) -> Html:
    """Return the main figures: best loss, number of ended trials, time and money."""
    report, best = data.report, data.study.best_loss
    name = next(iter(report.objectives), "loss") + ("" if report.repeated is None else f", {report.repeated.words}")
    limit = shown_limit(report.asked, report.ended)
    ended = f"of {counted(limit, 'trial')} ended" if limit else f"{'trial' if report.ended == 1 else 'trials'} ended"
    numbers = {
        f"best {name}": "–" if best is None else digits(best),
        ended: f"{report.ended:,}",
        "of trials": took(report.active_seconds),
        **({"of money": money(sum(report.money.values()))} if report.money else {}),
    }
    pairs = [element("div", element("dt", one_line(key, 60)), element("dd", each)) for key, each in numbers.items()]
    return element("dl", *pairs, class_="headline")


def best_trials(data: StudyData) -> Html:
    """Return a table of the best trials."""
    kinds = {"trial": "number", "loss": "number", "seconds": "number", "class": "text", "values": "text"}
    head = element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in kinds.items()))
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
        columns = zip(kinds.items(), cells, strict=True)
        rows.append(element("tr", *(element("td", cell, data_label=n, class_=kind) for (n, kind), cell in columns)))
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


#: height in pixels of a frame with an empty chart, and of a frame with marks, in which a taller chart scrolls
_EMPTY, _HEIGHT = 96, 560


class Picture:
    """A chart that a notebook displays as a picture. The attribute `chart` has its data."""

    def __init__(self, chart: Chart, classes: Collection[str]) -> None:
        """`classes` are the names of all compute classes of the study, in the order of their colours."""
        self.chart = chart
        self._classes = [*classes]

    def _repr_html_(self) -> str:
        """Return a frame that may run scripts, but has no access to the notebook."""
        figure = Figure(section="", charts=[(self.chart.name, self.chart)])
        data = encoded([figure], self._classes)
        page = document(self.chart.title, element("main", id="figures"), data, is_embedded=True)
        frame = element(
            "iframe",
            srcdoc=page,
            sandbox="allow-scripts",
            title=one_line(self.chart.title),
            style=f"width: 100%; height: {_HEIGHT if len(self.chart) else _EMPTY}px; border: 0",
        )
        return str(frame)

    def __repr__(self) -> str:
        return f"<chart {one_line(self.chart.title)!r}>"


class StudyPictures:
    """The charts of a study as methods, such as `history()`. Each reads the study and returns a `Picture`."""

    def __init__(self, study: StudyResults) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Callable[..., Picture]:
        chart = CHARTS.get(name)
        if chart is None:
            raise AttributeError(f"there is no chart {short(name)}; charts: {', '.join(sorted(CHARTS))}")

        def picture(*given: object, **named: object) -> Picture:
            data = StudyData(self._study)
            return Picture(chart.draw(data, *given, **named), data.classes)

        # `help` and a notebook's completion show these attributes.
        picture.__name__, picture.__doc__ = name, chart.make.__doc__
        picture.__signature__ = chart.signature  # type: ignore[attr-defined]
        return picture

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *CHARTS]


def study_html(study: StudyResults) -> str:
    """Return a study's summary and its best trials as HTML without scripts."""
    data = StudyData(study)
    report = data.report
    said = f"{report.best_words}; {report.counts_words}; trials ran for {took(report.active_seconds)}"
    line = element("p", element("strong", one_line(study.name)), f": {one_line(said, 500)}")
    return str(joined([line, best_trials(data)]))
