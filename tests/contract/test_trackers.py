"""Every tracker shows each trial once, under odd names too, and refuses to mix two studies of one name.

What they show is read back by the tools' own libraries.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from services.extras import needed
from services.tracked import read_mlflow, read_tensorboard, read_wandb

from shadho_celery.core.names import TRACKERS, named
from shadho_celery.errors import UsageError

#: names that a label or a metric may have
ODD = ["a b", "x/y", "../up", "/root", ".", "a//b", "é:=?*", "l" * 400, "with\ttab", "a:b", "a_b", "="]


def key_of(name: str) -> str:
    return sha256(name.encode()).hexdigest()[:16]


#: losses of three reports
REPORTS = [(step, 1e9 + step, {"loss": math.nan if step == 2 else step / 10}) for step in (1, 2, 3)]
PARAMS = {"rate": 0.5, "flag": True, "layers": 3, "kind": "plain"}
METRICS = {"loss": 0.25, "accuracy": 0.75}


def trial(
    name: str,
    number: int,
    params: Mapping[str, Any] = PARAMS,
    metrics: Mapping[str, float] = METRICS,
    reports: Sequence[tuple[int, float, Mapping[str, float]]] = REPORTS,
    **facts: str,
) -> Any:
    """Return a trial with the attributes of `EndedTrial`."""
    known = {"state": "COMPLETE", "compute_class": "cpu", "host": "here", "user": "me", "number": str(number)}
    return SimpleNamespace(
        number=number,
        id=f"{key_of(name)}-{number}",
        params=params,
        facts={**known, **facts},
        started_at=1e9,
        points=[*reports, (reports[-1][0] if reports else 0, 1e9 + 9, metrics)],
    )


class Tool:
    """A tool with a folder of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.uri = {"mlflow": f"sqlite:///{folder / 'mlflow.db'}", "tensorboard": str(folder)}.get(name, "me/project")

    def tracker(self, study: str, key: str = "") -> Any:
        return named(TRACKERS[self.name])(study, key or key_of(study), self.uri)

    def read(self, name: str) -> list[tuple[int, Mapping[str, Any]]]:
        if self.name == "mlflow":
            return sorted(read_mlflow(self.uri, name), key=lambda each: each[0])
        if self.name == "tensorboard":
            return sorted(read_tensorboard(self.folder / name), key=lambda each: each[0])
        found = read_wandb(self.folder / "wandb")
        return sorted((each for each in found if each[1]["group"] == name), key=lambda each: each[0])


# The imports of the slow ones take seconds.
@pytest.fixture(
    scope="module",
    params=[name if name == "tensorboard" else pytest.param(name, marks=pytest.mark.slow) for name in TRACKERS],
)
def tool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tool]:
    needed(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings():
        # Deprecations inside of these libraries are not ours.
        warnings.simplefilter("ignore")
        monkeypatch.chdir(folder)
        for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("WANDB_MODE", "offline")
        yield Tool(request.param, folder)
        if request.param == "wandb":
            import wandb

            wandb.teardown()


def test_trials_are_shown_once_and_a_later_tracker_knows_them(tool: Tool) -> None:
    first = tool.tracker("once")
    assert [*first.known] == []
    for number in (0, 10):
        first.log(trial("once", number))
    first.log(trial("once", 2, state="FAILED", error="ValueError", metrics={}, reports=[]))
    again = tool.tracker("once")
    assert sorted(again.known) == [0, 2, 10]
    again.log(trial("once", 3, state="CANCELLED", params={}))
    shown = tool.read("once")
    assert [number for number, _ in shown] == [0, 2, 3, 10]
    found = dict(shown)
    assert {str(found[0]["params"][label]) for label in ("rate", "layers", "kind")} <= {"0.5", "3", "3.0", "plain"}
    assert found[0]["metrics"]["loss"] == pytest.approx(0.25)
    assert found[0]["metrics"]["accuracy"] == pytest.approx(0.75)
    assert found[0]["steps"] == [1, 2, 3]
    assert len({str(found[number]["state"]) for number in (0, 10)}) == 1
    assert found[2]["state"] != found[0]["state"]


def test_odd_names_and_numbers_are_shown(tool: Tool) -> None:
    tracker = tool.tracker("Größe 1.0 %")
    metrics = {"loss": -1e300, **{f"{name}": float(place) for place, name in enumerate(ODD)}}
    tracker.log(trial("Größe 1.0 %", 0, params={name: f"{name}\n" for name in ODD}, metrics=metrics))
    wide = {f"label {place}": place for place in range(250)}
    long = [(step, 1e9, {"loss": math.inf, "ms": -math.inf}) for step in range(0, 9000, 8)]
    tracker.log(trial("Größe 1.0 %", 1, params=wide, reports=long, metrics={}))
    tracker.log(trial("Größe 1.0 %", 2, reports=[(-3, 1e9, {"loss": 1.0}), (2**40, 1e9, {"loss": 2.0})]))
    found = dict(tool.read("Größe 1.0 %"))
    assert {*found} == {0, 1, 2}
    assert len({*found[0]["params"]} - {"state", "compute_class", "_wandb"}) == len(ODD)
    assert len([name for name in found[1]["params"] if name.startswith("label ")]) == 250
    assert len(found[1]["steps"]) == len(long) > 1000


def test_another_study_of_the_same_name_is_refused(tool: Tool) -> None:
    tool.tracker("taken").log(trial("taken", 0))
    with pytest.raises(UsageError, match="taken"):
        tool.tracker("taken", "f" * 16)
    assert [number for number, _ in tool.read("taken")] == [0]


def test_the_name_of_a_study_leads_out_of_no_folder(tool: Tool) -> None:
    """The record may be a stranger's. MLflow makes no folder for it."""
    with nullcontext() if tool.name == "mlflow" else pytest.raises(UsageError, match="leads out"):
        tool.tracker("../../outside")
    assert not [*tool.folder.parent.rglob("outside")]
    assert not [*tool.folder.parent.parent.glob("outside")]


def test_a_trial_that_was_shown_in_part_is_completed(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after kill -9 while it was written: the end of the writing fails, and later it is written again."""
    last = {
        "mlflow": "mlflow.MlflowClient.set_terminated",
        "tensorboard": "pathlib.Path.rename",
        "wandb": "pathlib.Path.rename",
    }[tool.name]
    broken = tool.tracker("part")
    with monkeypatch.context() as failing:
        failing.setattr(last, killed)
        with pytest.raises(OSError, match="killed"):
            broken.log(trial("part", 0))
    again = tool.tracker("part")
    assert [*again.known] == []
    again.log(trial("part", 0))
    assert [*tool.tracker("part").known] == [0]
    [(number, found)] = tool.read("part")
    assert (number, found["steps"]) == (0, [1, 2, 3])


def killed(*_: object, **__: object) -> None:
    raise OSError("killed")


@pytest.mark.parametrize("tool", ["mlflow"], indirect=True)
def test_studies_share_an_experiment_that_the_environment_names(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "shared")
    tool.tracker("one").log(trial("one", 0))
    other = tool.tracker("two")
    assert [*other.known] == []
    assert [*tool.tracker("one").known] == [0]


@pytest.mark.parametrize("tool", ["wandb"], indirect=True)
def test_w_and_b_without_a_login_is_refused(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tool.folder / "netrc"))
    with pytest.raises(wandb.errors.UsageError, match="API key"):
        tool.tracker("online")
    wandb.teardown()


@pytest.mark.parametrize("tool", ["wandb"], indirect=True)
def test_w_and_b_knows_the_complete_runs_on_its_server(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    key, asked = key_of("served"), []
    runs: list[Any] = []

    class Api:
        def __init__(self, timeout: float) -> None:
            pass

        def runs(self, path: str, **how: Any) -> list[Any]:
            asked.append((path, how["filters"]))
            if not runs:
                raise ValueError("Could not find project me/project")
            return runs

    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()
    monkeypatch.setattr(wandb, "Api", Api)
    assert [*tool.tracker("served").known] == []
    states = ("finished", "failed", "crashed", "running", "finished")
    runs += [SimpleNamespace(id=f"{key}-{number}", state=state) for number, state in enumerate(states)]
    assert [*tool.tracker("served").known] == [0, 1, 4]
    assert asked[-1] == ("me/project", {"group": "served"})
    runs.append(SimpleNamespace(id="another", state="finished"))
    with pytest.raises(UsageError, match="W&B has another group served; name another project"):
        tool.tracker("served")
    wandb.teardown()
