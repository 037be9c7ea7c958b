"""Ends of logs: what came since the last answer, bounded in size, read once a second, and why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shadho_celery
from shadho_celery import hp, load_study
from shadho_celery.core.files import CHECKPOINTS, EMBEDDED
from shadho_celery.core.system import ManualClock
from shadho_celery.dashboard.answers import FRESH_SECONDS, MOST_BYTES, MOST_LOGS, LogEnds
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet.control import ReadLog, WorkerAnswer
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.runner.output import log_path
from shadho_celery.session.control import NotLeft, TrialLogs


class Rig:
    """Logs in the current folder, of a study with some trials."""

    def __init__(self, study: StudyResults) -> None:
        self.study, self.clock = study, ManualClock(100.0)
        self.ends = LogEnds(TrialLogs(), self.clock)

    def write(self, text: str, number: int = 0, *, mode: str = "a") -> None:
        path = log_path(CHECKPOINTS, self.study.key, number, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)

    def read(self, after: int = 0, number: int = 0, **asked: str) -> dict[str, Any]:
        self.clock.sleep(FRESH_SECONDS)
        return self.ends.read(self.study, number, {"after": str(after), **asked})


@pytest.fixture(name="rig")
def _rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.chdir(tmp_path)
    count = MOST_LOGS + 2
    shadho_celery.minimize(lambda x: x, hp.uniform("x", 0, 1), trials=count, study="s", store="sqlite:///s.db", seed=0)
    return Rig(load_study("sqlite:///s.db", "s"))


def test_an_answer_has_what_was_written_since_the_one_before(rig: Rig) -> None:
    rig.write("one <b>é</b>\n")
    first = rig.read()
    facts = {"attempt": 1, "attempts": 1, "is_live": False, "why": ""}
    assert first == facts | {"text": "one <b>é</b>\n", "start": 0, "end": 14}
    rig.write("two\n")
    assert rig.read(first["end"]) == facts | {"text": "two\n", "start": 14, "end": 18}
    assert rig.read(18)["text"] == ""
    assert rig.read(0)["text"] == "one <b>é</b>\ntwo\n", "another page begins at the beginning"


def test_of_a_long_log_the_end_is_sent_in_whole_lines(rig: Rig) -> None:
    lines = [f"line {number:06}\n" for number in range(20_000)]
    rig.write("".join(lines))
    found = rig.read()
    assert len(found["text"]) <= MOST_BYTES
    assert "".join(lines).endswith(found["text"])
    assert found["text"].startswith("line ")
    assert found["start"] == found["end"] - len(found["text"])
    assert rig.read(5)["start"] == found["start"], "what is not kept any more is not sent"


def test_a_log_that_was_begun_again_is_read_from_its_beginning(rig: Rig) -> None:
    rig.write("the first one is long\n")
    before = rig.read()
    rig.write("the second\n", mode="w")
    found = rig.read(before["end"])
    assert (found["text"], found["start"]) == ("the second\n", 0)


def test_without_a_log_the_answer_says_where_it_may_be(rig: Rig) -> None:
    assert rig.read()["why"] == "trial 0 ran in the process of its search, whose output is not kept"
    deed = ReadLog(study=rig.study.key, number=0, attempt=1)
    for host, why in ((None, "has printed nothing, or ran in another folder"), ("far", "is on far; give --redis")):
        with pytest.raises(NotLeft, match=why):
            TrialLogs().ask(deed, host, "the log", "trial 0 has printed nothing")
    (EMBEDDED / rig.study.key).mkdir(parents=True)
    with pytest.raises(NotLeft, match=r"^trial 0 has printed nothing$"):  # an embedded study runs in this folder alone
        TrialLogs().ask(deed, None, "the log", "trial 0 has printed nothing")
    with pytest.raises(UsageError, match="has 1 attempt;"):
        rig.read(attempt="2")
    with pytest.raises(UsageError, match="no trial 999"):
        rig.read(number=999)
    for text in ("-1", "x", "1" * 16, "٣"):
        with pytest.raises(UsageError, match="not a whole number"):
            rig.read(attempt=text)


class Worker:
    """Logs on another machine: counts how often they are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str | None]] = []
        self.answer: WorkerAnswer | ServiceError = WorkerAnswer(is_done=True, text="said\n", end=5)

    def read(
        self, study: StudyResults, trial: TrialResult, attempt: int, after: int, source: str | None
    ) -> tuple[WorkerAnswer, str]:
        self.asked.append((trial.number, after, source))
        if isinstance(self.answer, ServiceError):
            raise self.answer
        return self.answer, "cpu@far.1"


def test_a_log_is_read_once_a_second_however_many_pages_show_it(rig: Rig) -> None:
    worker = Worker()
    rig.ends = LogEnds(worker, rig.clock)  # type: ignore[arg-type]
    for _ in range(10):
        assert rig.ends.read(rig.study, 0, {})["text"] == "said\n"
    assert worker.asked == [(0, 0, None)]
    worker.answer = WorkerAnswer(is_done=True, text="more\n", end=10)
    assert rig.read(5)["text"] == "more\n"
    assert worker.asked[1:] == [(0, 5, "cpu@far.1")]
    for number in range(MOST_LOGS + 2):
        rig.ends.read(rig.study, number, {})
    worker.asked.clear()
    rig.ends.read(rig.study, MOST_LOGS + 1, {})
    rig.ends.read(rig.study, 0, {})
    assert worker.asked == [(0, 0, None)], "the log that was asked for longest ago was dropped"


def test_what_was_read_stays_when_the_worker_is_gone(rig: Rig) -> None:
    worker = Worker()
    rig.ends = LogEnds(worker, rig.clock)  # type: ignore[arg-type]
    assert rig.read()["why"] == ""
    for worker.answer, why in ((NotLeft("no worker is live"), "no worker"), (ServiceError("no Redis"), "no Redis")):
        found = rig.read()
        assert found["text"] == "said\n"
        assert why in found["why"]
