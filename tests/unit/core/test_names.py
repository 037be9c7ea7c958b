"""Names of other tools, and what they are here."""

from __future__ import annotations

import re
from typing import Any

import pytest
from services.cases import cases
from services.documents import text_of

import shadho_celery
from shadho_celery.core import names
from shadho_celery.core.settings import SETTINGS, no_setting
from shadho_celery.errors import UsageError

#: names of other tools -> a part of what is said of them as an argument of `minimize`, and as a key of STUDY
SAID = {
    "n_trials": ("here it is trials;", "here it is trials;"),
    "timeout": ("here it is seconds;", "here it is seconds;"),
    "directions": ("here it is objectives;", "here it is objectives;"),
    "callbacks": ("here it is on_trial;", "on_trial, a function in the study file"),
    "max_concurrent_trials": ("here it is workers;", "workers of minimize"),
    "load_if_exists": ('resume="if-exists"', 'resume="if-exists"'),
    "catch": ("not needed", "not needed"),
    "config": ("here it is space;", "known are"),
    "max_resource": ("pruner or fidelity", "pruner or fidelity"),
}


@cases(
    "room, heading, known",
    [
        ("samplers", "`--sampler`", [*names.SAMPLERS, "optuna"]),
        ("fidelity", "pruner", [*names.PRUNERS, names.NO_PRUNER]),
        ("fidelity", "`how`", names.FIDELITIES),
        ("placement", "`--policy`", names.POLICIES),
        ("placement", "`--shares`", names.SHARES),
    ],
)
def test_the_table_of_a_document_has_a_row_for_each_name_and_no_others(
    room: str, heading: str, known: list[str]
) -> None:
    text = text_of(room)
    rows = text.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert sorted(re.findall(r"^\| `(\w+)", "\n".join(rows), re.MULTILINE)) == sorted(known)


def test_every_name_here_that_is_no_text_is_one_of_this_package() -> None:
    """A row whose name has gone would not be noticed otherwise."""
    from shadho_celery.fidelity import ladder, pruners
    from shadho_celery.objective.context import CONTEXT_NAMES
    from shadho_celery.program.study import Study

    known = {*SETTINGS, *names.PRUNERS, *names.FIDELITIES, names.NO_PRUNER, *CONTEXT_NAMES, *dir(Study)}
    known |= {*ladder.Ladder.__struct_fields__, "how", "resume_if_exists", "objective", "space", "on_trial", "workers"}
    known |= {"seed", "study", *(field for name in names.PRUNERS for field in vars(getattr(pruners, name.title())))}
    assert {here for here in names.ELSEWHERE if here.isidentifier()} <= known


@cases("name, said", [(name, said) for name, (said, _) in SAID.items()])
def test_an_argument_of_another_tool_is_answered_with_the_one_here(name: str, said: str) -> None:
    arguments: dict[str, Any] = {name: 1}
    with pytest.raises(UsageError) as caught:
        shadho_celery.minimize(lambda values: 0.0, {}, **arguments)
    assert f"minimize has no argument {name}; " in str(caught.value)
    assert said in str(caught.value)


@cases("name, said", [(name, said) for name, (_, said) in SAID.items()])
def test_a_key_of_another_tool_is_answered_with_the_setting_here(name: str, said: str) -> None:
    assert said in str(no_setting(name))


@cases(
    "name, said",
    [
        ("create_study", "minimize(objective, space)"),
        ("optimize", "minimize(objective, space)"),
        ("TrialPruned", "context.should_stop()"),
        ("GridSearchCV", "sampler='grid'"),
        ("tune", "minimize(objective, space)"),
        ("directions", "objectives of a Study"),
    ],
)
def test_a_name_of_another_tools_module_is_answered_with_what_to_do(name: str, said: str) -> None:
    for error, statement in (
        (AttributeError, f"shadho_celery.{name}"),
        (AttributeError, f"getattr(shadho_celery, {name!r})"),
        (ImportError, f"from shadho_celery import {name}"),
        (ImportError, f"from shadho_celery import minimize, {name}"),
    ):
        with pytest.raises(error, match=f"shadho_celery has no {name}; here it is ") as caught:
            exec(statement, {"shadho_celery": shadho_celery})
        assert said in str(caught.value)
    assert not hasattr(shadho_celery, name)
    assert getattr(shadho_celery, name, None) is None


@cases(
    "name, said",
    [
        ("optimize", "run"),
        ("best_trial", "best"),
        ("best_trials", "front"),
        ("enqueue_trial", "enqueue"),
        ("add_trial", "add"),
    ],
)
def test_a_method_of_another_tools_study_is_answered_with_the_one_here(name: str, said: str) -> None:
    with (
        shadho_celery.Study({"x": shadho_celery.hp.uniform("x", 0, 1)}) as study,
        pytest.raises(AttributeError, match=f"no attribute '{name}'; here it is {said}$"),
    ):
        getattr(study, name)
    assert not hasattr(study, "something")
