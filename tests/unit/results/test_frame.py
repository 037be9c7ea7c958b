"""CSV files of trials: what a spreadsheet takes for a formula is quoted, and read back as it was."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery import Study, minimize
from shadho_celery.results.frame import quoted, unquoted
from shadho_celery.results.warm_start import of_table
from shadho_celery.space.compile import compile_space

TEXTS = ["=1+1", "+1", "-1", "@sum", "\t=1", "\r=1", "'=1+1", "''", "'a", "a=1", "", "1-1", "é"]
SPACE = {"text": hp.choice("text", ["=1+1", "@sum", "a=1"]), "-x": hp.uniform("-x", -2, -1)}


def rows(study: Study, *, plain: bool) -> list[dict[str, str]]:
    file = io.StringIO(newline="")
    study.write_csv(file, plain=plain)
    return [*csv.DictReader(io.StringIO(file.getvalue(), newline=""))]


@cases("text", TEXTS)
def test_a_quoted_text_is_no_formula_and_is_read_back_as_it_was(text: str) -> None:
    assert not quoted(text).startswith(("=", "+", "-", "@", "\t", "\r"))
    assert unquoted(quoted(text)) == text


def test_texts_and_names_are_quoted_and_numbers_are_not() -> None:
    study = minimize(lambda values: {"loss": values["-x"], "note": "=cmd"}, SPACE, trials=30, seed=0)
    safe, plain = rows(study, plain=False), rows(study, plain=True)
    assert {"=1+1", "@sum"} <= {row["text"] for row in plain}
    assert [row["text"] for row in safe] == [quoted(row["text"]) for row in plain]
    numbers = [trial.params["-x"] for trial in study.trials]
    assert [float(row["'-x"]) for row in safe] == [float(row["-x"]) for row in plain] == numbers
    assert {row["loss"][0] for row in safe} == {"-"}
    assert {row["note"] for row in safe} == {"'=cmd"}


@pytest.mark.parametrize("plain", [False, True])
def test_a_warm_start_reads_the_texts_of_an_export(plain: bool, tmp_path: Path) -> None:
    space = {"text": hp.choice("text", ["=1", "-1", "a\rb"]), "-x": hp.uniform("-x", -2, -1)}
    study = minimize(lambda values: values["-x"], space, trials=20, seed=0)
    path = tmp_path / "old.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        study.write_csv(file, plain=plain)
    found = of_table(path, compile_space(space))
    assert [dict(lesson.point) for lesson in found.trials] == [dict(trial.params) for trial in study.trials]


def test_a_csv_needs_no_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    study = minimize(lambda x: x, hp.uniform("x", 0, 1), trials=3, seed=0)
    assert [row["state"] for row in rows(study, plain=True)] == ["COMPLETE"] * 3
