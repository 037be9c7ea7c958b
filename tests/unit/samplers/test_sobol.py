"""The scrambled Sobol sequence is that of scipy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import qmc

from shadho_celery.samplers.qmc import DIRECTIONS, Sobol, sobol


@pytest.mark.parametrize("dimensions", [1, 2, 7, 1 + len(DIRECTIONS), 2 + len(DIRECTIONS)])
def test_its_points_are_exactly_those_of_scipy(dimensions: int) -> None:
    """However many are asked for at a time, and also in more dimensions than it has numbers for."""
    ours = sobol(dimensions, np.random.default_rng(7))
    theirs = qmc.Sobol(dimensions, seed=np.random.default_rng(7))
    for n in (64, 64, 1, 31, 512):
        assert np.array_equal(ours.random(n), theirs.random(n))
    assert isinstance(ours, Sobol) == (dimensions <= 1 + len(DIRECTIONS))


def test_a_search_proposes_its_first_points_without_scipys_statistics() -> None:
    """They take half a second to import."""
    code = """
import sys
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.samplers.auto import AutoSampler
from hyperopt import hp

[subspace] = split(compile_space({"x": hp.uniform("x", 0, 1), "y": hp.normal("y", 0, 1)}))
assert len(AutoSampler(subspace, [0]).ask(4, [])) == 4
assert "scipy.stats" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
