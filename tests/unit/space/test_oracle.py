"""hyperopt is the reference: what a compiled space builds and how it draws is compared with hyperopt's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hyperopt import hp, space_eval
from hyperopt.pyll import Apply, as_apply, scope, stochastic
from hyperopt.pyll.base import Lambda
from scipy import stats
from services.cases import cases

from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split


class Estimator:
    """Stands for a class given as a literal."""


@scope.define
def oracle_pair(first: Any, second: Any = None) -> list[Any]:
    """A user's function, which gives a list."""
    return [first, second]


@scope.define
def oracle_expression(value: Any) -> Any:
    """A user's function, which gives another expression."""
    return scope.add(as_apply(value), 1)


scope.define(Lambda("oracle_lambda", [("x", oracle_parameter := as_apply("parameter"))], oracle_parameter * 2))


def same(left: Any, right: Any) -> bool:
    """Equal, in value and in type, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


LEAVES = {
    "uniform": lambda label: hp.uniform(label, -5, 15),
    "quniform": lambda label: hp.quniform(label, -4.999, 5, 1),
    "uniformint": lambda label: hp.uniformint(label, 1, 9),
    "loguniform": lambda label: hp.loguniform(label, np.log(1e-4), np.log(10)),
    "qloguniform": lambda label: hp.qloguniform(label, 0, 4, 2),
    "normal": lambda label: hp.normal(label, 3, 2),
    "qnormal": lambda label: hp.qnormal(label, 0, 3, 0.5),
    "lognormal": lambda label: hp.lognormal(label, 0, 1),
    "qlognormal": lambda label: hp.qlognormal(label, 1, 1, 1),
    "randint": lambda label: hp.randint(label, 7),
    "randint from": lambda label: hp.randint(label, low=3, high=9),
    "choice": lambda label: hp.choice(label, ["a", 2, None, Estimator, (1, [2.0])]),
    "pchoice": lambda label: hp.pchoice(label, [(0.2, "a"), (0.5, 1.5), (0.3, {"b": [1]})]),
}


class RandomSpaces:
    """Makes spaces of every form, some nodes used in several places."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.count = 0

    def label(self) -> str:
        self.count += 1
        return f"x{self.count}"

    def leaf(self) -> Any:
        kind = self.random.choice(list(LEAVES))
        return LEAVES[kind](self.label())

    def number(self) -> Any:
        return LEAVES[self.random.choice([kind for kind in LEAVES if not kind.endswith("choice")])](self.label())

    def any(self, depth: int) -> Any:
        if self.nodes and self.random.random() < 0.15:
            return self.nodes[self.random.integers(len(self.nodes))]
        if depth == 0:
            return self.leaf()
        node = getattr(self, "make_" + self.random.choice(FORMS))(depth - 1)
        self.nodes.append(node)
        return node

    def several(self, depth: int) -> list[Any]:
        return [self.any(depth) for _ in range(self.random.integers(1, 4))]

    def make_leaf(self, depth: int) -> Any:
        return self.leaf()

    def make_literal(self, depth: int) -> Any:
        return [None, 3, "text", 2.5, True, Estimator, [1, (2, {"a": 1})], {}, ()][self.random.integers(9)]

    def make_dict(self, depth: int) -> Any:
        return {f"k{place}": value for place, value in enumerate(self.several(depth))}

    def make_numbered(self, depth: int) -> Any:
        return dict(enumerate(self.several(depth)))

    def make_list(self, depth: int) -> Any:
        return self.several(depth)

    def make_tuple(self, depth: int) -> Any:
        return tuple(self.several(depth))

    def make_choice(self, depth: int) -> Any:
        return hp.choice(self.label(), [None, *self.several(depth)])

    def make_pchoice(self, depth: int) -> Any:
        return hp.pchoice(self.label(), [(0.25, self.any(depth)), (0.75, self.any(depth))])

    def make_arithmetic(self, depth: int) -> Any:
        left, right = self.number(), self.number()
        forms = [lambda: 2**left, lambda: left + right, lambda: -left * 3, lambda: scope.int(left), lambda: left - 1]
        return forms[self.random.integers(len(forms))]()

    def make_call(self, depth: int) -> Any:
        forms = [
            lambda: scope.oracle_pair(self.any(depth), second=self.any(depth)),
            lambda: scope.oracle_pair(self.any(depth)),
            lambda: scope.oracle_expression(self.number()),
            lambda: scope.oracle_lambda(self.number()),
            lambda: scope.getitem(["p", "q", "r"], hp.randint(self.label(), 3)),
            lambda: scope.call(max, [self.number(), self.number()]),
            lambda: scope.switch(hp.randint(self.label(), 2), *[self.any(depth) for _ in range(2)]),
            lambda: scope.switch(scope.int(hp.quniform(self.label(), 0, 2, 1)), *[self.any(depth) for _ in range(3)]),
        ]
        return forms[self.random.integers(len(forms))]()


FORMS = [name.removeprefix("make_") for name in vars(RandomSpaces) if name.startswith("make_")]


def random_space(seed: int) -> Any:
    spaces = RandomSpaces(seed)
    return {"always": spaces.leaf(), "rest": spaces.any(int(spaces.random.integers(1, 6)))}


@pytest.mark.slow
@cases("seed", range(80))
def test_a_compiled_space_builds_what_hyperopt_builds(seed: int) -> None:
    expression = random_space(seed)
    space = compile_space(expression)
    for params in space.sample(np.random.default_rng(seed), 8):
        assert same(space.evaluate(params), space_eval(expression, params))
        assert set(params) == set(space.active(params)) <= set(space.domains)
        assert {type(value) for value in params.values()} <= {int, float}
        space.check(params)


@cases("seed", range(50))
def test_every_draw_lies_in_exactly_one_subspace_whose_leaves_hold_its_labels(seed: int) -> None:
    space = compile_space(random_space(seed))
    subspaces = split(space, 32)
    assert sum(subspace.probability for subspace in subspaces) == pytest.approx(1)
    assert len({subspace.name for subspace in subspaces}) == len(subspaces) <= 32
    for params in space.sample(np.random.default_rng(seed), 20):
        (home,) = [subspace for subspace in subspaces if subspace.contains(params)]
        assert set(params) <= set(home.fixed) | set(home.domains)
    for subspace in subspaces:
        for params in subspace.sample(np.random.default_rng(seed), 3):
            assert subspace.contains(params)
            assert not (set(subspace.fixed) & set(subspace.domains))
            assert set(subspace.fixed) <= set(params)


@cases("seed", range(30))
def test_a_label_is_active_only_under_one_of_its_conditions(seed: int) -> None:
    space = compile_space(random_space(seed))
    for params in space.sample(np.random.default_rng(seed), 20):
        for label in space.active(params):
            chains = space.conditions[label]
            assert any(all(params.get(choice) == place for choice, place in chain) for chain in chains)


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # hyperopt's own, under numpy 2.5
@cases("kind", LEAVES)
def test_a_law_draws_as_hyperopts_does(kind: str) -> None:
    size = 4000
    expression = LEAVES[kind]("x")
    space = compile_space({"x": expression})
    ours = [drawn["x"] for drawn in space.sample(np.random.default_rng(1), size)]
    raw = next(node for node in _nodes(expression) if node.name == "hyperopt_param")
    law = stochastic.recursive_set_rng_kwarg(raw.pos_args[1], np.random.default_rng(2))
    law.named_args.append(["size", as_apply(size)])
    theirs = np.asarray(stochastic.rec_eval(law)).tolist()
    assert type(ours[0]) is type(theirs[0])
    values = set(ours) | set(theirs)
    if len(values) > 200:
        assert stats.ks_2samp(ours, theirs).pvalue > 1e-3
        return
    mine, yours = Counter(ours), Counter(theirs)
    common = sorted(value for value in values if mine[value] + yours[value] >= 10)
    table = [[mine[value] for value in common], [yours[value] for value in common]]
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert all(mine[value] + yours[value] < 30 or mine[value] * yours[value] > 0 for value in values)


def _nodes(expression: Apply) -> list[Apply]:
    return [expression, *(below for child in expression.inputs() for below in _nodes(child))]


@cases("kind", LEAVES)
def test_inverting_the_law_gives_its_draws(kind: str) -> None:
    space = compile_space({"x": LEAVES[kind]("x")})
    domain = space.domains["x"]
    generator = np.random.default_rng(5)
    drawn = domain.sample(generator, 4000)
    inverted = domain.quantile(generator.random(4000))
    assert inverted.dtype == drawn.dtype
    assert stats.ks_2samp(drawn, inverted).pvalue > 1e-3
    assert all(domain.contains(value) for value in [*drawn.tolist(), *domain.quantile([0.0, 1.0]).tolist()])


def test_conditional_labels_are_drawn_with_the_priors_frequency() -> None:
    inner = hp.choice("inner", [{"u": hp.uniform("u", 0, 1)}, "none"])
    space = compile_space(hp.pchoice("outer", [(0.3, {"i": inner}), (0.2, {"j": inner}), (0.5, "leaf")]))
    drawn = space.sample(np.random.default_rng(0), 20_000)
    active = Counter(label for params in drawn for label in params)
    assert active["outer"] == 20_000
    assert active["inner"] == pytest.approx(10_000, rel=0.03)
    assert active["u"] == pytest.approx(5_000, rel=0.05)


def test_the_same_generator_gives_the_same_draws() -> None:
    space = compile_space(random_space(3))
    assert space.sample(np.random.default_rng(9), 50) == space.sample(np.random.default_rng(9), 50)
