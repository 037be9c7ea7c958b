"""Ranking and mapping are the paper's, at every size a study can have."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest

from shadho_celery.placement.paper import pair, planck_weights, rank

SIZES = [(t, c) for t in range(1, 25) for c in range(2, 25)]

#: (subspaces, classes) -> the numbers of the subspaces on each class, strongest class first
GOLDEN = {
    (4, 3): [[0, 1], [0, 1, 2, 3], [2, 3]],
    (4, 2): [[0, 1, 2, 3], [0, 1, 2, 3]],
    (4, 4): [[0], [0, 1, 2], [1, 2, 3], [3]],
    (8, 3): [[0, 1, 2], list(range(8)), [3, 4, 5, 6, 7]],
    (3, 4): [[0], [0, 1], [0, 1, 2], [2]],
    (2, 3): [[0], [0, 1], [0, 1]],
    (1, 3): [[0], [0], [0]],
    (16, 4): [[0, 1, 2, 3], list(range(12)), list(range(4, 16)), [12, 13, 14, 15]],
}


def published_pairs(subspaces: int, classes: int) -> set[tuple[int, int]]:
    """The paper's loop word for word, in exact arithmetic, as (subspace, class)."""
    longer, shorter = max(subspaces, classes), min(subspaces, classes)
    x = Fraction(longer, shorter)
    y, j, pairs = x - 1, 0, set()
    for i in range(longer):
        if i > ceil(y):
            j, y = j + 1, y + x
        if subspaces >= classes:
            pairs |= {(i, j), (i, j + 1 if j < Fraction(shorter, 2) else j - 1)}
        else:
            pairs |= {(j, i), (j, i + 1 if i < Fraction(longer, 2) else i - 1)}
    return pairs


@pytest.mark.parametrize(("sizes", "expected"), GOLDEN.items())
def test_pairing_gives_the_golden_table(sizes: tuple[int, int], expected: list[list[int]]) -> None:
    subspaces, classes = sizes
    names = [f"c{k}" for k in range(classes)]
    assert pair(range(subspaces), names) == dict(zip(names, expected, strict=True))


def test_pairing_leaves_no_class_empty_and_puts_each_subspace_on_neighbouring_classes() -> None:
    for subspaces, classes in SIZES:
        case = f"{subspaces} subspaces, {classes} classes"
        lists = pair(range(subspaces), range(classes))
        assert list(lists) == list(range(classes)), case
        assert all(members == sorted(set(members)) and members for members in lists.values()), case
        for subspace in range(subspaces):
            homes = [c for c, members in lists.items() if subspace in members]
            assert len(homes) >= 2, case
            assert homes == list(range(homes[0], homes[-1] + 1)), case


def test_pairing_is_the_published_loop() -> None:
    for subspaces, classes in SIZES:
        lists = pair(range(subspaces), range(classes))
        pairs = {(s, c) for c, members in lists.items() for s in members}
        assert pairs == published_pairs(subspaces, classes), f"{subspaces} subspaces, {classes} classes"


def test_a_single_class_gets_everything_in_rank_order() -> None:
    for subspaces in range(25):
        names = [f"m{k}" for k in range(subspaces)]
        assert pair(names, ["only"]) == {"only": names}, f"{subspaces} subspaces"


def test_nothing_to_pair_is_no_error() -> None:
    assert pair([], ["a", "b"]) == {"a": [], "b": []}
    assert pair(["m0"], []) == {}


def test_subspaces_need_not_be_hashable() -> None:
    assert pair([{"m": 0}], ["a", "b"]) == {"a": [{"m": 0}], "b": [{"m": 0}]}


def test_the_smallest_product_of_positions_comes_first() -> None:
    # positions by complexity: a1 b2 c3 d4; by performance: d1 b2 c3 a4; products: a4 b4 c9 d4
    complexities = {"a": 40.0, "b": 30.0, "c": 20.0, "d": 10.0}
    performances = {"a": 0.1, "b": 3.0, "c": 2.0, "d": 4.0}
    assert rank(["a", "b", "c", "d"], complexities, performances) == ["a", "b", "d", "c"]
    assert rank(["d", "c", "b", "a"], complexities, performances) == ["d", "b", "a", "c"]


def test_while_performances_are_equal_the_given_order_takes_their_place() -> None:
    complexities = {"linear": 21.98, "rbf": 175.71, "sigmoid": 351416.24, "poly": 675800.46}
    start = dict.fromkeys(complexities, 1.0)
    assert rank(["poly", "sigmoid", "rbf", "linear"], complexities, start) == ["poly", "sigmoid", "rbf", "linear"]
    # products from the other end: linear 4*1, rbf 3*2, sigmoid 2*3, poly 1*4
    assert rank(["linear", "rbf", "sigmoid", "poly"], complexities, start) == ["linear", "poly", "rbf", "sigmoid"]


def test_equal_scores_keep_the_given_order() -> None:
    names = ["q", "a", "z", "m"]
    assert rank(names, dict.fromkeys(names, 2.0), dict.fromkeys(names, 1.0)) == names
    assert rank([], {}, {}) == []


def test_planck_weights_are_the_golden_four() -> None:
    np.testing.assert_allclose(planck_weights(4), [0.455, 0.276, 0.167, 0.102], atol=5e-4)


def test_planck_weights_fall_and_add_up_to_one() -> None:
    for n in range(1, 65):
        weights = planck_weights(n)
        assert weights.shape == (n,)
        assert weights.sum() == pytest.approx(1.0), f"{n} weights"
        assert (np.diff(weights) < 0).all(), f"{n} weights"


def test_planck_weights_of_nothing_are_empty() -> None:
    assert planck_weights(0).shape == (0,)
