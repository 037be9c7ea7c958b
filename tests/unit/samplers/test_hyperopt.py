"""hyperopt's own algorithms by their names search the whole space, and know all trials by hyperopt's documents."""

from __future__ import annotations

from typing import Any

import hyperopt
import pytest
from hyperopt import base, hp
from services.trials import told

import shadho_celery
from shadho_celery.core.trial import TrialState
from shadho_celery.errors import UsageError
from shadho_celery.samplers import find_sampler
from shadho_celery.samplers.hyperopt import HyperoptSampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import undivided

TREE = hp.choice("k", [{"u": hp.uniform("u", -2, 2)}, {"v": hp.loguniform("v", -7, 0), "n": hp.randint("n", 2, 5)}])


def sampler_of(space: Any, name: str = "tpe") -> HyperoptSampler:
    sampler = find_sampler(f"hyperopt:{name}")(undivided(compile_space(space)), (0,))
    assert isinstance(sampler, HyperoptSampler)
    return sampler


def test_every_end_becomes_a_document_as_hyperopt_has_it() -> None:
    """Those of earlier runs too; a cancelled trial is none, and a pending one has no loss."""
    sampler = sampler_of(TREE)
    one, two, three, four = sampler.ask(4, [])
    sampler.tell([told({"k": 0, "u": 0.5}, 3.0), told({"k": 0, "u": 1.5}, TrialState.CANCELLED)])
    sampler.tell([told(three, TrialState.FAILED), told(one, 2.0), told(four, TrialState.CANCELLED)])
    documents = sampler._trials.trials
    found = [
        (document["state"], document["result"].get("loss"), document["result"]["status"]) for document in documents
    ]
    running, done = base.JOB_STATE_RUNNING, base.JOB_STATE_DONE
    assert found == [
        (done, 2.0, base.STATUS_OK),
        (running, None, base.STATUS_NEW),
        (done, None, base.STATUS_FAIL),
        (done, 3.0, base.STATUS_OK),
    ]
    assert base.spec_from_misc(documents[1]["misc"]) == two
    assert len({document["tid"] for document in documents}) == 4


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"^hyperopt has no sampler 'mix'; choose one of tpe, anneal, rand$"):
        find_sampler("hyperopt:mix")


def test_a_computed_choice_is_searched() -> None:
    first = hp.randint("first", 2)
    space = hyperopt.pyll.scope.switch(1 - first, {"a": hp.uniform("a", 0, 1)}, {"b": hp.uniform("b", 0, 1)})
    for params in sampler_of([first, space]).ask(20, []):
        assert {*params} == {"first", "ab"[1 - params["first"]]}


def test_fmin_takes_hyperopts_own_algorithms_and_no_name() -> None:
    def found(algo: Any) -> list[Any]:
        trials = hyperopt.Trials()
        shadho_celery.fmin(abs, hp.uniform("x", -1, 1), algo, 25, trials=trials, rstate=0, verbose=False)
        return [*trials.losses()]

    assert found(hyperopt.anneal.suggest) == found(hyperopt.anneal.suggest)
    assert found(hyperopt.tpe.suggest)[20:] != found(hyperopt.rand.suggest)[20:]
    with pytest.raises(UsageError, match=r"^algo is 'hyperopt:anneal'; give auto\.suggest"):
        found("hyperopt:anneal")


def test_a_space_that_it_cannot_search_is_refused_in_one_line() -> None:
    sampler = sampler_of(hp.randint("n", 2**62), "anneal")
    sampler.tell([told({"n": 7}, 1.0)])
    with pytest.raises(
        UsageError, match=r"^hyperopt cannot search this space: ValueError: .*; choose another sampler$"
    ):
        sampler.ask(1, [])
