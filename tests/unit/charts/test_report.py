"""The report in words and tables, without a browser."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hyperopt import hp
from services.cases import cases
from services.pictured import pictured

from shadho_celery import Study
from shadho_celery.charts.chart import MOST, Axis, Chart, Mark, Series
from shadho_celery.charts.report import Picture, StudyPictures, report_html, study_html, summary
from shadho_celery.charts.study import MOST_CHARACTERS, StudyData, figures_of
from shadho_celery.errors import UsageError
from shadho_celery.results.trial import given


def test_the_summary_answers_five_questions(tmp_path: Path) -> None:
    data = pictured(f"sqlite:///{tmp_path}/made.db", 150)
    found = dict(summary(data, figures_of(data)))
    assert (
        found["What was searched"][0]
        == "9 labels in 3 subspaces: model, act, dropout, rate, width, depth, trees, C and 1 more."
    )
    assert found["On what"][0].startswith("3 compute classes: cpu (")
    assert re.match(r"Best loss 0\.0\d+\.", found["What was found"][0])
    best = data.report.best
    assert best is not None
    assert found["What was found"][1] == f"Trial {best.number} has it: {given(best)}.", "as the command line shows it"
    assert "Most frequent failure: 10 x ValueError: singular matrix" in found["What was found"][-1]
    assert "% of the trials that this fleet could have completed." in found["How the machines were used"][0]
    assert any(sentence.startswith("One more ") for sentence in found["What to try next"])


def test_a_study_without_trials_has_a_report() -> None:
    with Study({"x": hp.uniform("x", 0, 1)}) as study:
        text = report_html(StudyData(study))
    assert "No trial has a loss yet." in text
    assert "No loss yet." in text


def test_a_report_without_a_complete_trial_says_so_once() -> None:
    with Study({"x": hp.uniform("x", 0, 1)}, seed=0) as study:
        none = figures_of(StudyData(study))
        for _ in range(3):
            study.tell(study.ask(), error="ValueError: no")
        found = figures_of(StudyData(study))
    assert [[chart.name for _, chart in each.charts] for each in none] == [["history"] * 2]
    empty = {chart.name: chart.empty for each in found for _, chart in each.charts if chart.empty}
    assert empty == {
        "history": "3 trials have failed, and none has a loss yet.",
        "failures": "Trial 0 has the traceback.",
    }


@pytest.mark.slow
@cases("loss", [1e300, -1e300, 0.0, 1e-300])
def test_a_study_of_one_trial_has_a_report(loss: float) -> None:
    with Study({"x": hp.uniform("x", 0, 1)}, seed=0) as study:
        study.tell(study.ask(), loss)
        assert '<td data-label="trial" class="number">0</td>' in report_html(StudyData(study))


def test_what_a_trial_wrote_is_text_in_the_report() -> None:
    hostile = "</script><script>alert(1)</script>\u202e"
    with Study({hostile: hp.choice(hostile, [hostile, "<i>"])}, seed=0) as study:
        for _ in range(30):
            study.tell(study.ask(), 1.0)
        text = report_html(StudyData(study))
        shown = study_html(study)
    assert text.count("</script>") == 2
    assert text.count("alert(1)") > 3
    assert "<i>" not in text
    assert "\u202e" not in text + shown
    assert "<script" not in shown


def test_a_long_label_is_short_wherever_the_summary_names_it(tmp_path: Path) -> None:
    long = "l" * 10_000
    space = {long: hp.uniform(long, 0, 1), f"{long} 2": hp.choice(f"{long} 2", ["tree", "net"])}
    with Study(space, seed=0) as study:
        for _ in range(200):
            trial = study.ask()
            study.tell(trial, trial.params[long])
        data = StudyData(study)
        found = dict(summary(data, figures_of(data)))
        text = report_html(data)
    sentences = [sentence for each in found.values() for sentence in each]
    assert max(map(len, sentences)) < MOST_CHARACTERS
    shown = f"{long[:37]}..."
    assert any(sentence.startswith(f"The best trials have {shown} at the lower end") for sentence in sentences)
    assert shown in found["What was found"][-1], "the title of a chart"
    assert long[: MOST_CHARACTERS + 1] not in text


def test_a_report_of_several_losses_has_the_front(tmp_path: Path) -> None:
    objectives = {"loss": "minimize", "speed": "maximize"}
    with Study({"x": hp.uniform("x", 0, 1)}, objectives=objectives, seed=0) as study:
        for _ in range(20):
            trial = study.ask()
            study.tell(trial, {"losses": {"loss": trial.values["x"], "speed": trial.values["x"] ** 2}})
        names = [name for figure in figures_of(StudyData(study)) for name, _ in figure.charts]
        text = report_html(StudyData(study))
    assert {"front", "hypervolume"} <= {*names}
    assert "20 of 20 trials are on the front" in text
    assert "minimize loss, maximize speed" in text


def test_a_study_shows_itself_in_a_notebook() -> None:
    with Study({"x": hp.uniform("x", 0, 1)}, seed=0) as study:
        for _ in range(3):
            study.tell(study.ask(), 0.5)
        html = study._repr_html_()
        picture = study.charts.slice("x")
        frame = picture._repr_html_()
    assert "best loss 0.5; 3 complete, 0 failed; " in html
    assert html.count("<tr>") == 4
    assert repr(picture) == "<chart 'The loss over x'>"
    assert frame.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert 'sandbox="allow-scripts"' in frame


def test_an_unknown_param_or_trial_is_refused() -> None:
    with Study({"x": hp.uniform("x", 0, 1)}) as study:
        with pytest.raises(UsageError, match="no param 'y'"):
            study.charts.slice("y")
        with pytest.raises(UsageError, match="no trial 7"):
            study.charts.why_here(7)
        with pytest.raises(AttributeError, match="there is no chart 'nothing'; charts: contour, curves, "):
            study.charts.nothing()
        with pytest.raises(TypeError, match="label"):
            study.charts.slice()


def test_each_chart_of_a_study_is_shown_in_notebooks(tmp_path: Path) -> None:
    from shadho_celery.charts.study import CHARTS

    data = pictured(f"sqlite:///{tmp_path}/made.db", 40)
    pictures = StudyPictures(data.study)
    assert {*CHARTS} <= {*dir(pictures)}
    needed: dict[str, tuple[object, ...]] = {"slice": ("rate",), "learning_curve": (0,)}
    for name in CHARTS:
        if name != "why_here":
            assert getattr(pictures, name)(*needed.get(name, ()))._repr_html_()


def test_a_chart_adds_at_most_half_a_megabyte_to_a_notebook() -> None:
    values = np.random.default_rng(0).random((2, MOST))
    marks = Series.of("trials", Mark.POINTS, "best", x=values[0], y=values[1], number=np.arange(MOST))
    chart = Chart(title="random", axes=[Axis(name="x"), Axis(name="y")], series=[marks])
    assert len(Picture(chart, [])._repr_html_()) <= 500_000
