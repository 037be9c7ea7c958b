"""A user's own sampler needs ask and tell, and what it proposes is checked before a trial is made of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
from hyperopt import hp

from shadho_celery import Study
from shadho_celery.core.trial import Params, Trial
from shadho_celery.errors import UsageError
from shadho_celery.samplers import find_sampler
from shadho_celery.samplers.random import RandomSampler, Sampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split

SPACE = hp.choice("kind", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.uniform("b", 0, 1)}])
FIRST, SECOND = split(compile_space(SPACE))


class Same:
    """Proposes the params that it is given."""

    params: ClassVar[Params] = {"kind": 0, "a": 0.5}

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        self.told: list[Trial] = []

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        return [self.params] * n

    def tell(self, trials: Sequence[Trial]) -> None:
        self.told += trials


def proposing(params: Any, **facts: Any) -> Any:
    return type("Odd", (Same,), {"params": params, **facts})


def test_it_asks_and_learns_as_any_other() -> None:
    sampler = find_sampler(Same)(FIRST, (0, 0))
    assert sampler.ask(2, []) == [Same.params] * 2
    assert sampler.adaptive
    assert not find_sampler(proposing(Same.params, adaptive=False))(FIRST, (0, 0)).adaptive


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"kind": 0, "a": 7.0}, r"^sampler Odd proposed .*'a': 7\.0 is outside uniform"),
        ({"kind": 0}, r"^sampler Odd proposed .*lack 'a'"),
        ({"kind": 0, "a": 0.5, "x": 1}, r"^sampler Odd proposed .*no hyperparameter 'x'"),
        ({"kind": 1, "b": 0.5}, r"^sampler Odd left subspace kind={'a': a}"),
        (None, r"^sampler Odd proposed None"),
    ],
)
def test_params_that_are_not_of_its_subspace_are_named(params: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_sampler(proposing(params))(FIRST, (0, 0)).ask(1, [])


def test_what_is_no_list_of_params_is_named() -> None:
    odd = type("Odd", (Same,), {"ask": lambda self, n, pending: None})
    with pytest.raises(UsageError, match=r"^sampler Odd returned None from ask; return a list of params"):
        find_sampler(odd)(FIRST, (0, 0)).ask(1, [])


def test_one_that_cannot_ask_or_tell_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^sampler Mute lacks tell; it needs ask\(n, pending\) and tell\(trials\)"):
        find_sampler(type("Mute", (), {"__init__": Same.__init__, "ask": Same.ask}))(SECOND, (0, 1))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"ask": lambda self, n: []}, r"^ask of sampler Odd takes other arguments; write def ask\(self, n, pending\)$"),
        ({"tell": lambda self: None}, r"^tell of sampler Odd takes other arguments; write def tell\(self, trials\)$"),
        (
            {"__init__": lambda self, *_: 1 / 0},
            r"^sampler Odd failed in its constructor: ZeroDivisionError.* \(test_own.py:\d+\)",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_named_before_it_is_asked(facts: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_sampler(proposing(Same.params, **facts))(FIRST, (0, 0))


def test_what_its_code_raises_is_one_line_with_the_place() -> None:
    def fails(self: Any, *_: Any) -> list[Params]:
        raise KeyError("loss")

    sampler = find_sampler(proposing(Same.params, ask=fails, tell=fails))(FIRST, (0, 0))
    with pytest.raises(UsageError, match=r"^sampler Odd failed in ask: KeyError: 'loss' \(test_own.py:\d+\); fix it$"):
        sampler.ask(1, [])
    with pytest.raises(UsageError, match=r"^sampler Odd failed in tell: KeyError"):
        sampler.tell([])


def test_what_holds_of_a_sampler_within_a_function_or_a_class_of_ones_own_holds_of_it() -> None:
    """A finite space is repeated once all of its points are tried, and a partial has the facts of its class."""

    class Whole(RandomSampler):
        spans_space = True

    def by_tpe(subspace: Subspace, entropy: Sequence[int]) -> Sampler:
        return find_sampler("tpe")(subspace, entropy)

    for sampler in (by_tpe, partial(by_tpe)):
        with Study(hp.choice("c", [1, 2, 3]), seed=0, sampler=sampler) as study:
            assert len([study.ask() for _ in range(8)]) == 8
    assert all(find_sampler(make).spans_space for make in (Whole, partial(Whole), partial(partial(Whole))))


@pytest.mark.parametrize("make", [RandomSampler, partial(RandomSampler)])
def test_the_name_of_its_class_is_recorded_with_each_trial(make: Any) -> None:
    with Study({"x": hp.uniform("x", 0, 1)}, seed=0, sampler=make) as study:
        study.ask()
        assert study.trials[0].sampler == "RandomSampler"
