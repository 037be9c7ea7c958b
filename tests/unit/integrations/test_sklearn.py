"""`ShadhoSearchCV` is a search of scikit-learn: the same table, attributes and conventions as RandomizedSearchCV."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import joblib
import numpy as np
import pytest
import sklearn
from scipy import stats
from services.cases import cases
from sklearn.base import BaseEstimator, clone
from sklearn.datasets import load_iris
from sklearn.exceptions import FitFailedWarning
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import GroupKFold, KFold, RandomizedSearchCV, ShuffleSplit
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from shadho_celery import hp
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.integrations.sklearn import ShadhoSearchCV

X, Y = load_iris(return_X_y=True)
#: the checks of scikit-learn that concern a search; all others concern the estimator that it has found
CHECKS = re.compile(
    "(check_estimator_(cloneable|get_tags|repr)|.*set_params|check_no_attributes_set|check_fit_score_takes_y|.*tags.*"
    "|check_(dont_overwrite|estimators_(overwrite|fit_returns|pickle|unfitted|empty)|dict_unchanged|fit_idempotent)"
    "|check_(n_features_in|fit_check_is_fitted|pipeline|estimator_sparse_tag|dataframe|mixin)|check_classifiers_classes)"
)


class Toy(BaseEstimator):
    """An estimator whose score has its maximum at x = 3, and which fails below 0, also in the second fold only."""

    def __init__(self, x: float = 1.0, kind: Any = "plain", inner: Any = None) -> None:
        self.x, self.kind, self.inner = x, kind, inner

    def fit(self, data: Any, target: Any = None) -> Toy:
        if self.x < 0 or (self.kind == "second" and data[0, 0] == 0):
            raise ArithmeticError("below zero")
        self.is_fitted_ = True
        return self

    def score(self, data: Any, target: Any = None) -> float:
        if self.kind == "nan" and self.x > 5:
            return float("nan")
        return -((self.x - 3) ** 2)


#: numbers of the samples, so that a fold is known by its first sample
NUMBERS = np.arange(12.0).reshape(12, 1)


def searched(space: Any, estimator: Any = None, n_trials: int = 6, **given: Any) -> Any:
    given = {"cv": KFold(2), "random_state": 0, **given}
    return ShadhoSearchCV(estimator or Toy(), space, n_trials=n_trials, **given).fit(NUMBERS)


def drawn(search: Any, name: str) -> list[Any]:
    return [params[name] for params in search.cv_results_["params"]]


def test_the_table_has_the_form_of_scikit_learns() -> None:
    space = {"alpha": stats.loguniform(0.01, 10), "solver": ["svd", "cholesky"], "fit_intercept": [True]}
    same: dict[str, Any] = {"cv": 3, "random_state": 0, "return_train_score": True}
    ours = ShadhoSearchCV(RidgeClassifier(), space, n_trials=4, **same).fit(X, Y)
    theirs = RandomizedSearchCV(RidgeClassifier(), space, n_iter=4, **same).fit(X, Y)
    forms = [
        {name: (type(column), getattr(column, "dtype", None), len(column)) for name, column in each.cv_results_.items()}
        for each in (ours, theirs)
    ]
    assert forms[0] == forms[1]
    # best_estimator_ and the methods are those of BaseSearchCV, which find all that they need.
    assert vars(ours).keys() - vars(theirs).keys() == {"n_trials", "param_space", "sampler"}
    assert ours.best_score_ == max(ours.cv_results_["mean_test_score"])
    assert ours.best_params_["alpha"] == ours.best_estimator_.alpha
    assert ours.score(X, Y) > 0.7
    assert (ours.predict(X) == ours.best_estimator_.predict(X)).all()
    assert clone(ours).get_params()["n_trials"] == 4


def test_scikit_learns_checks_of_estimators_pass() -> None:
    search = ShadhoSearchCV(RidgeClassifier(), {"alpha": stats.loguniform(0.1, 10)}, n_trials=2, cv=2, random_state=0)
    names = set()
    for estimator, check in estimator_checks_generator(search):
        if CHECKS.match(name := check.func.__name__):
            names.add(name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(estimator)
    assert len(names) > 20


def test_a_seed_repeats_a_search() -> None:
    space = {"x": stats.uniform(0, 10), "kind": ["plain", "other"]}
    first, second = (searched(space, n_trials=12).cv_results_["params"] for _ in range(2))
    assert first == second
    assert searched(space, n_trials=12, random_state=1).cv_results_["params"] != first
    generators = (np.random.RandomState(3) for _ in range(2))
    assert len({str(searched(space, random_state=each).cv_results_["params"]) for each in generators}) == 1


def test_it_learns_from_scores() -> None:
    assert abs(searched({"x": stats.uniform(0, 1000)}, n_trials=18).best_params_["x"] - 3) < 1


def test_batches_have_n_jobs_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    with joblib.parallel_backend("threading", n_jobs=4):
        search = searched({"x": stats.uniform(0, 10)}, n_trials=10, verbose=1)
    assert re.findall(r"each of (\d+) candidates", capsys.readouterr().out) == ["4", "4", "2"]
    assert len(set(drawn(search, "x"))) == 10


@cases(
    "law, kind, low, high",
    [
        (stats.uniform(-1, 3), float, -1, 2),
        (stats.loguniform(1e-3, 1e2), float, 1e-3, 1e2),
        (stats.loguniform(1, 10, loc=5), float, 6, 15),
        (stats.randint(2, 5), int, 2, 4),
        (stats.norm(50, 0.1), float, 49, 51),
        (stats.gamma(2.0, scale=3.0), float, 0, 60),
        (stats.poisson(4), int, 0, 20),
        (stats.rv_discrete(values=([3, 7], [0.5, 0.5])).freeze(), int, 3, 7),
    ],
)
def test_distributions_of_scipy(law: Any, kind: type, low: float, high: float) -> None:
    """Values have the type and the range of the distribution, and reach its tails."""
    found = drawn(searched({"inner": law}, n_trials=10), "inner")
    assert {type(value) for value in found} == {kind}
    assert low - 1e-9 <= min(found) <= law.ppf(0.25)
    assert law.ppf(0.75) <= max(found) <= high + 1e-9


def test_options_are_passed_on_as_they_are() -> None:
    options = [(1, 2), {"a": [1]}, np.log, StandardScaler, GaussianNB(), None, "text", 2.5]
    search = searched({"inner": options}, n_trials=20)
    assert len(found := drawn(search, "inner")) == len(options)
    assert {id(value) for value in found} == {*map(id, options)}
    assert sorted(drawn(searched({"x": np.arange(3)}), "x")) == [0, 1, 2]
    assert sorted(drawn(searched({"x": range(3)}), "x")) == [0, 1, 2]


def test_hp_expressions_give_params_by_branch() -> None:
    branches = [{"kind": "a", "x": hp.uniform("ax", 0, 1)}, {"kind": "b", "inner": hp.uniformint("inner", 1, 9)}]
    for space in (hp.choice("branch", branches), {"branch": hp.choice("branch", branches)}):
        search = searched(space, n_trials=10)
        assert {frozenset(params) for params in search.cv_results_["params"]} == {
            frozenset({"kind", "x"}),
            frozenset({"kind", "inner"}),
        }
        assert search.cv_results_["param_x"].mask.any()
        # A param that a branch lacks keeps its default.
        found = {float(Toy().set_params(**params).x) for params in search.cv_results_["params"] if "x" not in params}
        assert found == {1.0}


def test_steps_of_a_pipeline_are_searched() -> None:
    steps = Pipeline([("scale", StandardScaler()), ("model", RidgeClassifier())])
    nested = [
        {"model": RidgeClassifier(), "model__alpha": hp.loguniform("alpha", -3, 3)},
        {"model": GaussianNB(), "model__var_smoothing": hp.loguniform("smoothing", -20, 0)},
    ]
    space = {"scale": ["passthrough", StandardScaler()], "which": hp.choice("which", nested)}
    search = ShadhoSearchCV(steps, space, n_trials=12, cv=2, random_state=0).fit(X, Y)
    assert {type(params["model"]) for params in search.cv_results_["params"]} == {RidgeClassifier, GaussianNB}
    assert search.score(X, Y) > 0.8


@pytest.mark.filterwarnings("ignore:One or more of the", "ignore::sklearn.exceptions.FitFailedWarning")
def test_a_failing_candidate_has_the_error_score_and_the_search_goes_on() -> None:
    """A batch whose fits all fail is not in the table, and warns as other failures do."""
    space = {"x": [-2.0, -1.0, 2.0, 4.0]}
    with pytest.warns(FitFailedWarning, match="ArithmeticError: below zero"):
        search = searched(space, return_train_score=True, n_trials=4)
    assert {*drawn(search, "x")} == {2.0, 4.0}
    assert search.best_score_ == -1
    named = searched(space, scoring=lambda estimator, *_: {"a": -estimator.x, "b": estimator.x}, refit="b")
    assert named.best_params_ == {"x": 4.0}
    with joblib.parallel_backend("threading", n_jobs=4):
        table = searched(space).cv_results_
        assert np.isnan(table["mean_test_score"]).sum() == 2
        assert sorted(searched(space, error_score=-50.0).cv_results_["mean_test_score"]) == [-50, -50, -1, -1]


@pytest.mark.filterwarnings("ignore:One or more of the")
def test_a_fold_that_fails_and_scores_of_nan() -> None:
    with pytest.warns(FitFailedWarning, match="1 fits failed out of a total of 2"):
        search = searched({"x": [1.0, 3.5], "kind": ["plain", "second"]})
    assert np.isnan(search.cv_results_["mean_test_score"]).sum() == 2
    assert search.best_params_ == {"x": 3.5, "kind": "plain"}
    assert searched({"x": [1.0, 6.0], "kind": ["nan"]}).best_params_["x"] == 1.0


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.FitFailedWarning")
def test_a_search_of_which_all_fits_fail() -> None:
    with pytest.raises(ValueError, match="All the 2 fits failed"):
        searched({"x": [-1.0, -2.0]})
    with pytest.raises(ArithmeticError, match="below zero"):
        searched({"x": [-1.0, 2.0]}, error_score="raise")


class Distant:
    """Can draw values, but has no quantiles."""

    def rvs(self, random_state: Any = None) -> float:
        return 1.0


@cases(
    "space, given, words",
    [
        (hp.uniform("x", 0, 1), {}, "param_space gives 0.5.*; it must give a dict of params by name"),
        (None, {}, "param_space gives None; it must give a dict of params by name"),
        (3, {}, "param_space gives 3; it must give a dict of params by name"),
        ({"x": []}, {}, "'x': nothing to choose from"),
        ({"x": stats.uniform}, {}, "'x' is no frozen distribution of one number"),
        ({"x": stats.dirichlet([1, 2])}, {}, "'x' is no frozen distribution of one number"),
        ({"x": Distant()}, {}, "'x' is no frozen distribution of one number"),
        ({"x": stats.uniform(0, -1)}, {}, "'x' is no frozen distribution of one number"),
        ({"x": hp.uniform("x", 1, 0)}, {}, "'x'.*uniform"),
        ({"x": [1, 2]}, {"sampler": "best"}, "there is no sampler 'best'"),
    ],
)
def test_an_invalid_space(space: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises((SpaceError, UsageError), match=words) as caught:
        searched(space, **given)
    assert "\n" not in str(caught.value)


@cases(
    "space",
    [{"y": [1, 2]}, hp.choice("c", [{"x": hp.uniform("x", 0, 1)}, {"y": hp.uniform("y", 0, 1)}])],
)
def test_a_param_that_the_estimator_lacks(space: Any) -> None:
    with pytest.raises(ValueError, match="Invalid parameter 'y' for estimator Toy"):
        searched(space)


@cases(
    "estimator, given",
    [(7, {}), ("text", {}), (Toy(), {"n_trials": 0}), (Toy(), {"refit": 3.5})],
)
def test_other_invalid_arguments(estimator: Any, given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        searched({"x": [1, 2]}, estimator, **given)
    assert len(str(caught.value).splitlines()) == 1


@cases("sampler", ["auto", "random"])
def test_a_finite_space_is_searched_once(sampler: str) -> None:
    search = searched({"x": stats.randint(0, 4), "kind": ["a", "b"]}, n_trials=50, sampler=sampler)
    assert len({str(params) for params in search.cv_results_["params"]}) == 8
    assert len(search.cv_results_["params"]) == 8
    assert len(searched({"x": stats.uniform(0, 1)}, sampler="grid", n_trials=50).cv_results_["params"]) == 5


def test_a_sampler_of_ones_own_may_fail() -> None:
    class Failing:
        def __init__(self, subspace: Any, entropy: Any) -> None:
            self.asked = 0

        def ask(self, n: int, pending: Any) -> list[Any]:
            self.asked += n
            return [{"x": self.asked / 10}] * n if self.asked < 4 else 1 / 0

        def tell(self, trials: Any) -> None:
            pass

    with pytest.raises(UsageError, match="ZeroDivisionError"):
        searched({"x": stats.uniform(0, 1)}, sampler=Failing)


def test_several_metrics_and_a_callable_refit() -> None:
    def metrics(estimator: Any, *_: Any) -> dict[str, float]:
        return {"near": -abs(estimator.x - 3), "large": estimator.x}

    space = {"x": stats.uniform(0, 100)}
    assert searched(space, scoring=metrics, refit="large", n_trials=12).best_params_["x"] > 99
    assert abs(searched(space, scoring=metrics, refit="near", n_trials=12).best_params_["x"] - 3) < 5
    search = searched(space, scoring=metrics, refit=lambda table: int(table["rank_test_near"].argmax()))
    assert search.best_index_ == search.cv_results_["rank_test_near"].argmax()
    assert not hasattr(searched(space, scoring=metrics, refit=False), "best_estimator_")


class Splits(BaseEstimator):
    """Scores a candidate by the sum of its test samples, so that its folds can be read from its scores."""

    def __init__(self, x: float = 1.0) -> None:
        self.x = x

    def fit(self, data: Any, target: Any = None) -> Splits:
        return self

    def score(self, data: Any, target: Any = None) -> float:
        return float(data.sum())


def one_time() -> Iterator[tuple[list[int], list[int]]]:
    yield [0, 1, 2], [3, 4]
    yield [3, 4, 5], [0, 1]


@cases("cv", [ShuffleSplit(3, test_size=0.3), KFold(3, shuffle=True), 3, [([0, 1], [2, 3]), ([2, 3], [0, 1])]])
def test_all_candidates_have_the_same_folds(cv: Any) -> None:
    table = searched({"x": stats.uniform(0, 1)}, Splits(), cv=cv).cv_results_
    assert all(len(set(table[name])) == 1 for name in table if name.startswith("split"))
    table = searched({"x": stats.uniform(0, 1)}, Splits(), cv=one_time()).cv_results_
    assert {*table["split0_test_score"]} == {7.0}


@cases("routing", [False, True])
def test_groups_reach_the_splitter(routing: bool) -> None:
    groups = np.repeat([0, 1, 2], 4)
    with sklearn.config_context(enable_metadata_routing=routing):
        search = ShadhoSearchCV(Splits(), {"x": stats.uniform(0, 1)}, n_trials=3, cv=GroupKFold(3), random_state=0)
        table = search.fit(NUMBERS, groups=groups).cv_results_
    assert sorted(table[f"split{fold}_test_score"][0] for fold in range(3)) == [6.0, 22.0, 38.0]
