"""A recorded study and its exported table are the same source; labels mean what their objective got."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery import load_study, minimize
from shadho_celery.errors import ShadhoError
from shadho_celery.results.frame import FACTS
from shadho_celery.results.warm_start import Source, fit, of_study, of_table, read_source
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.store.sql import SqlStore

STORE = "sqlite:///shadho.db"


def space(*kinds: Any, widest: float = 2.0, base: float = 10.0) -> dict[str, Any]:
    options = [*(kinds or ("a", {"name": "b", "k": hp.randint("k", 3)}, (1, 2), None, 16))]
    return {
        "rate": base ** hp.uniform("rate", -widest, widest),
        "units": hp.uniformint("units", 1, 9),
        "loss": hp.quniform("loss", 0, 1, 0.25),
        "kind": hp.choice("kind", options),
    }


def objective(values: Any) -> float:
    if values["units"] == 3:
        raise ValueError("three")
    return float(values["units"])


def pairs(source: Source) -> list[tuple[Mapping[str, Any], Any]]:
    return [(each.point, each.loss) for each in source.trials]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    minimize(objective, space(), trials=40, seed=0, sampler="random", store=STORE, study="old-1", progress=False)


@pytest.fixture
def store() -> Iterator[SqlStore]:
    with closing(SqlStore(STORE)) as opened:
        yield opened


def test_the_trials_of_a_study_that_succeeded_are_given(store: SqlStore) -> None:
    found = read_source("old", compile_space(space()), store)
    study = load_study(STORE, "old")
    assert found.name == "study old-1"
    assert pairs(found) == [(trial.params, trial.loss) for trial in study.trials if trial.state == "COMPLETE"]
    assert found.left_out == {"failed": study.count("FAILED")}


@pytest.mark.slow
def test_a_table_of_export_is_the_same(store: SqlStore) -> None:
    """Drawn values and names of options are found, and a label of a taken name has its own column."""
    compiled = compile_space(space())
    study = load_study(STORE, "old")
    study.dataframe().to_csv("old.csv", index=False)
    table, stored = read_source("old.csv", compiled, store), of_study(study, compiled)
    assert (len(table.trials), table.left_out) == (len(stored.trials), stored.left_out)
    for (point, loss), (params, known) in zip(pairs(table), pairs(stored), strict=True):
        assert loss == known
        assert point == pytest.approx(params, rel=1e-9)


def test_a_study_of_another_store_is_named_with_its_url(tmp_path: Path) -> None:
    with closing(SqlStore("sqlite:///other.db")) as other:
        found = read_source(f"{STORE}#old", compile_space(space()), other)
    assert found.name == "study old-1"


def test_options_that_moved_are_found_and_those_that_are_gone_are_not_of_the_space() -> None:
    study = load_study(STORE, "old")
    moved = of_study(study, compile_space(space(16, "new", "a")))
    for trial, (point, _) in zip((t for t in study.trials if t.state == "COMPLETE"), pairs(moved), strict=True):
        assert point["kind"] == {0: 2, 4: 0}.get(trial.params["kind"], point["kind"])
        assert isinstance(point["kind"], int) is (trial.params["kind"] in {0, 4})


def test_a_number_whose_expression_changed_does_not_teach_and_one_whose_domain_changed_does() -> None:
    """The draw would give the objective something else."""
    study = load_study(STORE, "old")
    study.dataframe().to_csv("old.csv", index=False)
    complete = [trial for trial in study.trials if trial.state == "COMPLETE"]
    for read in (partial(of_study, study), partial(of_table, Path("old.csv"))):
        wider = read(compile_space(space(widest=3.0)))
        assert [point["rate"] for point, _ in pairs(wider)] == pytest.approx([each.params["rate"] for each in complete])
        changed = compile_space(space(base=100.0))
        with pytest.raises(ShadhoError, match=f"{len(complete)} outside rate"):
            fit(read(changed), split(changed))


def test_a_table_of_ones_own_has_drawn_values() -> None:
    Path("own.csv").write_text("rate,loss\n1.5,1\n", encoding="utf-8")
    assert pairs(of_table(Path("own.csv"), compile_space(space()))) == [({"rate": 1.5}, 1)]


def test_a_cell_that_python_alone_reads_as_a_number_is_a_text() -> None:
    Path("own.csv").write_text("rate,loss\n1_0,1\n\u0661,1\n1.5,1\n", encoding="utf-8")
    compiled = compile_space(space())
    found = fit(of_table(Path("own.csv"), compiled), split(compiled))
    assert [trial.params["rate"] for trial in found.trials] == [1.5]


def test_of_budgets_the_greatest_teaches_or_the_least_of_a_study_with_rungs() -> None:
    budgets = {"least": 1, "most": 9, "eta": 3, "how": "halving"}
    study = minimize(lambda values: 1.0, space(), trials=13, seed=0, fidelity=budgets, progress=False)
    compiled = compile_space(space())
    assert len(of_study(study, compiled).trials) == study.count() - sum(t.budget != 9 for t in study.trials)
    assert len(of_study(study, compiled, least=1.0).trials) == sum(t.budget == 1 for t in study.trials)


def test_a_plain_table_needs_a_label_and_losses() -> None:
    Path("plain.csv").write_text("\ufeffkind,k,loss,note\nb,2,0.5,x\n16,,1e-3,y\na,,,z\n", encoding="utf-8")
    found = of_table(Path("plain.csv"), compile_space(space()))
    assert pairs(found) == [({"kind": 1, "k": 2}, 0.5), ({"kind": 4}, 1e-3), ({"kind": 0}, "")]


def read(options: Sequence[Any], cells: Sequence[str], header: str = "c,loss") -> list[Any]:
    """Return the options that the cells of a table teach."""
    compiled = compile_space({"c": hp.choice("c", [*options])})
    rows = "".join(f'"{cell}",1\n' for cell in cells)
    Path("cells.csv").write_text(f"{header}\n{rows}", encoding="utf-8")
    found = fit(of_table(Path("cells.csv"), compiled), split(compiled))
    return [compiled.evaluate(trial.params)["c"] for trial in found.trials]


@pytest.mark.parametrize(
    ("options", "cells", "taught"),
    [
        (["01", "02", "03"], ["01", "02", "03"], ["01", "02", "03"]),
        (["3.10", "1e3", "1_0", "a"], ["1_0", "1e3", "3.10"], ["1_0", "1e3", "3.10"]),
        (["2", "1", "0"], ["0", "1", "2"], ["0", "1", "2"]),
        ([2, 1, 0], ["0", "1", "2"], [0, 1, 2]),
        ([1, 0.5, 0], ["0.0", "0.5", "1.0"], [0, 0.5, 1]),
        ([1000, 10], ["1e3", "10"], [1000, 10]),
        ([True, False, None], ["False", "true", "None", "null"], [False, True, None, None]),
        (["1e3", "1000", 1000.0, True], ["1e3", "1000", "1000.0"], ["1e3", "1000", 1000.0]),
        (["'a", "a", "''a", "=x"], ["''a", "'a", "a", "=x"], ["''a", "'a", "a", "=x"]),
        (["nan", "inf", "True", "None"], ["None", "nan", "True", "inf"], ["None", "nan", "True", "inf"]),
    ],
)
def test_a_cell_of_a_choice_is_the_option_of_that_text(options: list[Any], cells: list[str], taught: list[Any]) -> None:
    assert list(map(repr, read(options, cells))) == list(map(repr, taught))


def test_options_whose_texts_are_alike_are_given_as_they_are_shown() -> None:
    assert read(["1", 1, "2"], ["'1'", "1", "'2'"]) == ["1", 1, "2"]


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        (["'a", "''a", "'=x", "=x", "a"], False),
        (["'-1", "-1", -1], False),
        (["'a", "-1", "=x", "a"], True),
        ([" a", "a ", "", "'"], False),
        *((["+", "@", "\t", "\r", "\n", "'"], plain) for plain in (True, False)),
    ],
)
def test_a_table_of_export_teaches_its_own_options(options: list[Any], *, plain: bool) -> None:
    study = minimize(lambda values: 1.0, hp.choice("c", options), trials=20, seed=0, sampler="random", progress=False)
    with Path("own.csv").open("w", encoding="utf-8", newline="") as file:
        study.write_csv(file, plain=plain)
    found = of_table(Path("own.csv"), compile_space(hp.choice("c", options)))
    assert [lesson.point["c"] for lesson in found.trials] == [trial.params["c"] for trial in study.trials]


def test_rows_without_apostrophes_may_be_added_to_a_table_of_export() -> None:
    """A person who adds a row writes the text of the option as it is."""
    space = hp.choice("-c", ["a", "-b", "=x", "@"])
    study = minimize(lambda values: 1.0, space, trials=20, seed=0, sampler="random", progress=False)
    with Path("own.csv").open("w", encoding="utf-8", newline="") as file:
        study.write_csv(file)
    lines = Path("own.csv").read_text().splitlines()
    quoted_row = next(line for line in lines if ",'-b," in line)
    Path("own.csv").write_text("\n".join([*lines, quoted_row.replace(",'-b,", ",-b,")]) + "\n")
    found = of_table(Path("own.csv"), compile_space(space))
    assert [lesson.point["-c"] for lesson in found.trials] == [*(trial.params["-c"] for trial in study.trials), 1]


@pytest.mark.parametrize("others", [(), [name for name in FACTS if name != "loss"]])
def test_the_index_of_an_option_is_no_option(others: Sequence[str]) -> None:
    header = ",".join(["c", "loss", *others])
    with pytest.raises(ShadhoError, match="1 outside c"):
        read([1, 2, 4], ["0"], header)
    assert read([1, 2, 4], ["4"], header) == [4]


@pytest.mark.parametrize(("old", "new"), [([0, 1, 2], [1, 2]), (["0", "1"], [0, 1]), ([1, 0], ["1", "0"])])
def test_an_option_of_an_earlier_study_that_is_gone_is_no_index(old: list[Any], new: list[Any]) -> None:
    study = minimize(lambda values: 1.0, hp.choice("c", old), trials=9, seed=0, sampler="random", progress=False)
    compiled = compile_space(hp.choice("c", new))
    for trial, lesson in zip(study.trials, of_study(study, compiled).trials, strict=True):
        option = old[trial.params["c"]]
        is_there = any(type(each) is type(option) and each == option for each in new)
        assert lesson.point["c"] == (new.index(option) if is_there else None)


def test_options_that_are_objects_are_found_by_their_texts_in_a_study_and_its_table(store: SqlStore) -> None:
    options = [Path("a"), Decimal(1), partial(max, 1), np.float32, b"x", datetime.date(2020, 1, 1)]
    study = minimize(
        lambda values: 1.0, {"c": hp.choice("c", options)}, trials=30, sampler="random", seed=0, progress=False
    )
    study.dataframe().to_csv("objects.csv", index=False)
    compiled = compile_space({"c": hp.choice("c", options[::-1])})
    for source in (of_study(study, compiled), of_table(Path("objects.csv"), compiled)):
        told = [compiled.evaluate(trial.params)["c"] for trial in fit(source, split(compiled)).trials]
        assert told == [options[trial.params["c"]] for trial in study.trials]


def test_options_that_no_text_tells_apart_do_not_teach() -> None:
    options = [*(object() for _ in range(2)), "a"]
    study = minimize(
        lambda values: 1.0, {"c": hp.choice("c", options)}, trials=20, sampler="random", seed=0, progress=False
    )
    study.dataframe().to_csv("objects.csv", index=False)
    compiled = compile_space({"c": hp.choice("c", options)})
    found = fit(of_table(Path("objects.csv"), compiled), split(compiled))
    assert {trial.params["c"] for trial in found.trials} == {2}
    assert "outside c (3 options)" in found.words


def test_several_losses_and_constraints_come_from_a_study_and_from_its_table() -> None:
    objectives = {"error": "minimize", "acc": "maximize"}

    def several(x: float) -> Any:
        return {"losses": {"acc": x, "error": -x}, "constraints": {"size": x - 1}}

    study = minimize(several, hp.uniform("x", 0, 2), trials=6, seed=0, objectives=objectives, progress=False)
    study.dataframe().to_csv("old.csv", index=False)
    compiled = compile_space(hp.uniform("x", 0, 2))
    table = of_table(Path("old.csv"), compiled, objectives=objectives)
    for source in (of_study(study, compiled), table):
        for trial, own in zip(fit(source, split(compiled), objectives).trials, study.trials, strict=True):
            x = own.params["x"]
            assert trial.outcome.losses == pytest.approx({"error": -x, "acc": -x})
            assert (trial.outcome.loss, trial.outcome.constraints["size"]) == pytest.approx((own.loss, x - 1))


def test_a_whole_number_too_long_for_a_float_is_outside_of_its_label() -> None:
    long = "9" * 400
    Path("long.csv").write_text(f"kind,rate,units,loss\na,{long},1,1\na,1,-{long},1\na,1,1,{long}\na,1,1,1\n")
    compiled = compile_space(space())
    found = fit(of_table(Path("long.csv"), compiled), split(compiled))
    assert len(found.trials) == 1
    assert all(word in found.words for word in ("1 outside rate", "1 outside units", "1 without a finite loss"))


def test_a_label_named_as_a_column_that_is_read_needs_a_prefix_and_the_message_says_so() -> None:
    compiled = compile_space({"loss": hp.uniform("loss", 0, 9), "seconds": hp.uniform("seconds", 0, 1)})
    Path("own.csv").write_text("loss\n1\n")
    with pytest.raises(ShadhoError, match=r"columns named after the labels: param\.loss, seconds; its columns are"):
        of_table(Path("own.csv"), compiled)
    Path("own.csv").write_text("param.loss,seconds,loss\n5,0.5,1\n")
    [trial] = fit(of_table(Path("own.csv"), compiled), split(compiled)).trials
    assert (trial.params, trial.outcome.loss) == ({"loss": 5, "seconds": 0.5}, 1)


@pytest.mark.parametrize("column", ["loss", "acc", "loss.acc"])
def test_a_table_of_ones_own_has_what_the_objective_returns(column: str) -> None:
    Path("own.csv").write_text(f"kind,{column}\n16,0.75\n", encoding="utf-8")
    compiled, objectives = compile_space(space()), {"acc": "maximize"}
    [trial] = fit(of_table(Path("own.csv"), compiled, objectives=objectives), split(compiled), objectives).trials
    assert (trial.outcome.loss, trial.outcome.losses) == (-0.75, {"acc": -0.75})


def test_the_losses_of_export_without_names_were_minimised(store: SqlStore) -> None:
    load_study(STORE, "old").dataframe().to_csv("old.csv", index=False)
    compiled, objectives = compile_space(space()), {"acc": "maximize"}
    for given in ("old.csv", "old"):
        found = fit(read_source(given, compiled, store, objectives=objectives), split(compiled), objectives)
        assert all((trial.outcome.loss or 0) > 0 for trial in found.trials)


@pytest.mark.parametrize(
    ("given", "content", "words"),
    [
        (
            "none",
            None,
            "there is no study named 'none' in sqlite:///shadho.db; shadho-celery studies lists its studies",
        ),
        ("", None, "the warm start is empty; give a study's name"),
        ("sqlite:///shadho.db", None, "does not name a study; write STORE_URL#STUDY"),
        ("sqlite:///none.db#old", None, "there is no store"),
        ("none.csv", None, "the warm start none.csv cannot be read: No such file or directory"),
        ("a.csv", b"", "the warm start a.csv needs the column loss, and columns named after the labels: rate, units"),
        ("a.csv", b"kind\na\n", "needs the column loss, and"),
        ("a.csv", b"loss,x\n1,2\n", "param.loss, kind and 1 more; its columns are ['loss', 'x']"),
        (
            "a.csv",
            b"kind,loss,kind\na,1,b\n",
            "the warm start a.csv has several columns named 'kind'; rename or delete",
        ),
        ("a.csv", b"loss,kind\n", "the warm start a.csv has no trials"),
        (
            "a.csv",
            b"loss,kind\n\xff,1\n",
            "the warm start a.csv cannot be read: it is not text in UTF-8; give a file as written by",
        ),
        ("a.csv", b'loss,kind\n"1,a\n', "the warm start a.csv is not a CSV file"),
    ],
)
def test_what_is_no_source_is_refused(store: SqlStore, given: str, content: bytes | None, words: str) -> None:
    if content is not None:
        Path(given).write_bytes(content)
    with pytest.raises(ShadhoError) as caught:
        read_source(given, compile_space(space()), store)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2
