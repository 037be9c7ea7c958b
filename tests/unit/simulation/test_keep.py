"""A simulated study in a store is the study that was simulated, at the time at which its simulation ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from services.families import Family, cluster_of, fleet_of

from shadho_celery.cli.group import commands
from shadho_celery.errors import StoreError, UsageError
from shadho_celery.results.study import StudyResults
from shadho_celery.simulation.executor import Change
from shadho_celery.simulation.simulation import MOMENTS, Simulation, keep, simulate
from shadho_celery.space.stored import read_given
from shadho_celery.store.base import Turn
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study

#: seconds since the epoch, and of the simulation
END, SECONDS = 1_790_000_000.0, 600.0


@pytest.fixture(scope="module", name="played")
def _played() -> Simulation:
    """Two classes, of which one loses two workers."""
    changes = [Change(at=200, compute_class="cpu", workers=-2)]
    families = {
        "net": Family(seconds={"gpu": 4, "cpu": 20}, failure_rate=0.1),
        "tree": Family(seconds={"gpu": 6, "cpu": 5}, failure_rate=0.1),
    }
    return simulate(cluster_of(fleet_of({"gpu": 2, "cpu": 6}, changes=changes), families, {"seconds": SECONDS}))


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Iterator[SqlStore]:
    with closing(SqlStore(f"sqlite:///{tmp_path}/kept.db")) as store:
        yield store


def test_every_record_is_the_simulated_one_with_its_moments_shifted(played: Simulation, store: SqlStore) -> None:
    key = keep(played, store, "fleet", END).key
    pairs: list[tuple[Any, Any]] = []
    for kept, simulated in (
        (store.trials(key), played.store.trials()),
        (store.attempts(key), played.store.attempts()),
        (store.sessions(key), played.store.sessions()),
    ):
        pairs += zip(kept, simulated, strict=True)
    for kept, simulated in pairs:
        for name in kept.__struct_fields__:
            expected = getattr(simulated, name)
            if name in MOMENTS and expected is not None:
                expected = pytest.approx(expected + END - SECONDS, abs=1e-6)
            if name == "given":
                x = kept.params[f"x {kept.subspace.removeprefix('family=')}"]
                assert read_given(kept.given, {})[0]["x"] == x
            elif name != "live":
                assert getattr(kept, name) == expected, f"{name} of {simulated}"
    assert store.machines(key) == played.store.machines()
    assert {"lost", "failed", "complete", None} == {each.end for each in store.attempts(key)}


def test_a_reader_finds_the_study_as_one_that_has_ended_with_its_space_and_settings(
    played: Simulation, store: SqlStore
) -> None:
    record = keep(played, store, "my fleet/2", END)
    assert record.name == f"simulated-my-fleet-2-cost-{record.key[:6]}"
    found = StudyResults(store, store.find(record.name))
    assert found.best is not None
    assert found.best.loss == played.best
    assert store.holder(record.key, END) is None
    assert found.in_force["policy"] == "cost"
    assert found.best.values["family"] in {"net", "tree"}
    assert record.created_at == END - SECONDS
    latest = max(each.ended_at for each in store.attempts(record.key) if each.ended_at is not None)
    assert END - 60 < latest <= END


def test_a_simulated_study_says_so_and_cannot_continue(
    played: Simulation, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    record = keep(played, store, "fleet", END)
    shown = CliRunner().invoke(commands, ["show", record.name, "--store", store.safe_url])
    assert shown.exit_code == 0
    assert "simulated: its trials ran on no machine" in shown.stdout
    assert "resume=True" not in shown.stdout
    assert "simulated" in CliRunner().invoke(commands, ["studies", "--store", store.safe_url]).stdout.split()
    steered = CliRunner().invoke(commands, ["stop", record.name, "--store", store.safe_url])
    assert (steered.exit_code, "was simulated, so there is nothing to steer" in steered.stderr) == (2, True)
    refused = CliRunner().invoke(commands, ["resume", record.name, "--store", store.safe_url])
    assert refused.exit_code == 2
    assert f"study {record.name} was simulated, and cannot continue" in refused.stderr
    with pytest.raises(UsageError, match="was simulated"):
        open_study(store, record.space, name=record.name, resume=True)


def test_a_study_that_cannot_be_written_whole_is_not_there(
    played: Simulation, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.write

    def refuse(key: str, fence: int, now: float, turn: Turn) -> Any:
        if turn.attempted:
            raise StoreError("the disk is full")
        return write(key, fence, now, turn)

    monkeypatch.setattr(store, "write", refuse)
    with pytest.raises(StoreError, match="disk is full"):
        keep(played, store, "fleet", END)
    assert store.records() == []
