"""How much labels explain of the losses: an additive model of all labels, measured on held-out trials."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hyperopt import hp
from services.columns import trials

from shadho_celery import minimize
from shadho_celery.charts.columns import read_trials
from shadho_celery.charts.params import LEAST, MOST_LABELS, explained, groups, loss_shares


def drifting(count: int = 100, seed: int = 0) -> list[dict[str, object]]:
    """Trials of a sampler that draws the late ones near the best in all labels, of which only `x` matters."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for place in range(count):
        late = place >= count // 2
        x, useless = rng.normal([0.3, 0.7], 0.08) if late else rng.uniform(size=2)
        loss = (x - 0.3) ** 2 + 0.003 * rng.normal()
        rows.append({"loss": loss, "params": {"x": float(x), "useless": float(useless)}})
    return rows


def test_drift_of_the_sampler_gives_no_share_to_a_label_that_is_never_read() -> None:
    alone = []
    for seed in range(5):
        columns = trials(drifting(seed=seed))
        useless = columns.labels["useless"]
        alone.append(explained(groups(useless, np.arange(100)), np.argsort(np.argsort(columns.loss)).astype(float)))
        found = loss_shares(columns)
        assert found.shares["useless"] < 0.05
        assert found.leaders == ("x",)
    assert max(share or 0.0 for share in alone) > 0.1, "compared label by label it would have a share"


def test_searches_name_the_labels_that_are_read() -> None:
    space = {
        "rate": hp.loguniform("rate", math.log(1e-5), 0.0),
        "useless": hp.uniform("useless", 0, 1),
        "net": hp.choice(
            "net", [{"width": hp.quniform("width", 8, 256, 8)}, {"filters": hp.quniform("filters", 4, 64, 4)}]
        ),
    }
    for seed in range(3):
        noise = random.Random(seed)
        study = minimize(
            lambda values, noise=noise: (math.log10(values["rate"]) + 3) ** 2 + 0.05 * noise.gauss(0, 1),
            space,
            trials=80,
            seed=seed,
            progress=False,
        )
        found = loss_shares(read_trials(study))
        assert found.leaders == ("rate",)
        assert found.shares["useless"] < 0.1
        assert sum(found.shares.values()) <= 1.0


def test_shares_sum_to_at_most_one_and_are_the_same_each_time() -> None:
    rng = np.random.default_rng(2)
    rows = []
    for a, b in rng.uniform(size=(200, 2)).tolist():
        rows.append({"loss": a + 2 * b, "params": {"a": a, "b": b, "fixed": 1.0}})
    found = loss_shares(trials(rows))
    assert 0.9 < sum(found.shares.values()) <= 1.0
    assert found.shares["a"] == pytest.approx(0.2, abs=0.06)
    assert found.shares["fixed"] == 0.0
    assert found == loss_shares(trials(rows))


def test_labels_that_always_have_the_same_values_are_named_together() -> None:
    rows = [{"loss": a, "params": {"a": a, "b": a}} for a in np.random.default_rng(2).uniform(size=100).tolist()]
    assert {*loss_shares(trials(rows)).leaders} == {"a", "b"}


def test_conditional_labels_and_options_have_shares() -> None:
    rng = np.random.default_rng(3)
    rows = []
    for u in rng.uniform(size=200).tolist():
        kind = float(rng.integers(2))
        params = {"kind": kind, **({"depth": u} if kind else {})}
        rows.append({"loss": 2 * kind * u - kind, "params": params})
    shares = loss_shares(trials(rows, options={"kind": ["tree", "net"]})).shares
    assert shares["depth"] > 0.5
    assert shares["kind"] < 0.1


def test_noise_names_no_label() -> None:
    rng = np.random.default_rng(4)
    named = 0
    for _ in range(20):
        rows = [{"loss": loss, "params": {"a": a, "b": b}} for a, b, loss in rng.normal(size=(60, 3)).tolist()]
        named += bool(loss_shares(trials(rows)).leaders)
    assert named <= 2


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_equal_and_missing_losses_are_explained_by_nothing(loss: float) -> None:
    rows = [{"loss": loss, "params": {"a": float(place)}} for place in range(50)]
    assert loss_shares(trials(rows)).leaders == ()


def test_few_trials_and_many_labels() -> None:
    assert not loss_shares(trials(drifting(LEAST - 1))).shares
    rng = np.random.default_rng(6)
    rows = []
    for _ in range(100):
        params = {f"p{place:02}": float(rng.uniform()) for place in range(MOST_LABELS + 10)}
        rows.append({"loss": params["p07"], "params": params})
    found = loss_shares(trials(rows))
    assert len(found.shares) == MOST_LABELS + 10
    assert found.leaders == ("p07",)
