"""An event that passes the channel's door, however strange, is learnt from and kept: the study goes on."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery.core.attempts import Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Event, TrialState
from shadho_celery.fleet.channel import unseal
from shadho_celery.fleet.signing import UNSIGNED
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits

TRIALS = 60
SPACE = hp.choice("side", [{"x": hp.uniform("x", 0, 1)}, {"y": hp.loguniform("y", -5, 5), "n": hp.randint("n", 5)}])

#: values of each field, most of them at the border of what passes, or beyond it
LOSSES = [0.0, -0.0, 5e-324, 1.7976931348623157e308, -1.7976931348623157e308, math.nan, math.inf, -math.inf, "1", None]
SECONDS = [None, 0.0, 5e-324, 1.5, 1e10, 1e11, -1.0, math.nan, math.inf, "1"]
MEMORY = [None, 0, 1, 2**63 - 1, 2**63, -1, 1e300]
NAMES = [None, "", "cpu", "größe", 255 * "\U0001f600", 256 * "x", "a\0b", "\ud800", "'; drop table trials; --", 5, []]
MOMENTS = [0, 1.5, 1e11, 1e12, -1, None, math.nan]
TEXTS = [None, "", "a\0b", "\ud800", 16_000 * "\U0001f600", 16_001 * "x", 5]
DEEP: dict[str, Any] = {}
METRICS = [{}, {"": 1}, {"a\0": "\ud800"}, {"a": 10**4000}, {"a": math.inf}, {"a": [math.nan]}, DEEP, [], "x"]
place = DEEP
for _ in range(800):
    place["deeper"] = place = {}


class Strangers:
    """An executor whose workers answer each attempt with strange results, and then with a plain one."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._sent: list[Attempt] = []
        self.refused = self.taken = 0

    def classes(self) -> Sequence[ComputeClass]:
        return [ComputeClass(name=name, slots=4, memory=2**33, hosts={"h": 4}) for name in ("gpu_large", "cpu")]

    def submit(self, attempts: Sequence[Attempt]) -> None:
        self._sent += attempts

    def poll(self, seconds: float) -> Sequence[Event]:
        sent, self._sent = self._sent, []
        heard = [unseal("k", self._strange(attempt), UNSIGNED) for attempt in sent for _ in range(4)]
        self.refused += heard.count(None)
        events: list[Any] = [event for event in heard if event is not None]
        self.taken += len(events)
        plain = [unseal("k", self._plain(attempt), UNSIGNED) for attempt in sent]
        assert None not in plain
        return [*events, *plain]

    def renew_lock(self) -> None:
        pass

    def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
        pass

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        pass

    def close(self) -> None:
        pass

    def _strange(self, attempt: Attempt) -> str:
        draw = self._random.choice
        kind = draw(["started", "report", "result", "result", "result", "lost"])
        event: dict[str, Any] = {
            "kind": kind,
            "number": attempt.number,
            "attempt": draw([1, attempt.attempt, 2**53 - 1]),
        }
        if kind == "result":
            event["outcome"] = {"state": draw(["COMPLETE", "COMPLETE", "FAILED", "PRUNED"])}
            fields = {"loss": LOSSES, "seconds": SECONDS, "memory": MEMORY, "metrics": METRICS}
            for name in self._random.sample([*fields], 2):
                event["outcome"][name] = draw(fields[name])
            event["outcome"] |= {"loss": 0.5} if event["outcome"]["state"] == "COMPLETE" and draw([0, 1]) else {}
            event["outcome"][draw(["error", "warning"])] = draw(TEXTS)
        if kind == "report":
            event |= {"step": draw([0, -(2**63), 2**63 - 1, 2**63]), "loss": draw(LOSSES)}
        if kind == "lost":
            return json.dumps({**event, "reason": draw(TEXTS), "claimed": draw([True, False, 1])})
        event[draw(["host", "worker", "compute_class"])] = draw(NAMES)
        return json.dumps({"host": "h", **event, "at": draw(MOMENTS)})

    def _plain(self, attempt: Attempt) -> str:
        outcome = {"state": "COMPLETE", "loss": self._random.random(), "seconds": 1.0}
        event = {"kind": "result", "number": attempt.number, "attempt": attempt.attempt, "outcome": outcome, "at": 1.0}
        return json.dumps({**event, "compute_class": attempt.compute_class})


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize(
    ("sampler", "shares", "policy"),
    [("random", "uniform", "cost"), ("tpe", "promise", "paper"), ("tpe", "uniform", "fifo")],
)
def test_a_study_of_strange_events_ends_and_resumes(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, sampler: str, shares: str, policy: str
) -> None:
    url = f"sqlite:///{tmp_path / 'shadho.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    space, settings = compile_space(SPACE), StudySettings(sampler=sampler, shares=shares, policy=policy)
    for resume in (False, True):
        clock = ManualClock(1e9)
        study = open_study(SqlStore(url), space.describe(), name="n", resume=resume, seed=0, clock=clock)
        executor = Strangers()
        scheduler = make_scheduler(Plan.of(space, settings, Limits(trials=TRIALS * (1 + resume))), study, executor)
        scheduler.run(lambda clock=clock: clock.sleep(5.0))  # type: ignore[misc]
        study.close()
        assert executor.taken > 20 < executor.refused
        assert study.counted >= TRIALS * (1 + resume)
        complete = [trial for trial in study.trials if trial.state is TrialState.COMPLETE]
        assert all(trial.outcome.loss is not None and math.isfinite(trial.outcome.loss) for trial in complete)
        assert study.best is not None
        assert study.best.outcome.loss == min(
            trial.outcome.loss for trial in complete if trial.outcome.loss is not None
        )
