"""The answers of the dashboard to its pages."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import numpy as np
import pytest
from click.testing import CliRunner
from hyperopt import hp
from services.cases import cases
from services.golden import check
from services.played import record_played
from starlette.requests import Request
from starlette.testclient import TestClient

import shadho_celery
from shadho_celery import load_study
from shadho_celery.charts.columns import Depth
from shadho_celery.charts.study import CHARTS, MOST_CHARACTERS
from shadho_celery.cli.group import commands
from shadho_celery.cli.status import places_of
from shadho_celery.core.records import (
    Answer,
    AttemptRecord,
    Cancel,
    Deed,
    Drain,
    Enqueue,
    Pause,
    Set,
    Stop,
    Undrain,
    Unpause,
    name_of,
)
from shadho_celery.core.system import ManualClock
from shadho_celery.dashboard import answers, cache, server
from shadho_celery.dashboard.access import Access
from shadho_celery.dashboard.answers import LogEnds, buttons
from shadho_celery.dashboard.cache import FRESH_ANSWERS, FRESH_SECONDS, Cache, CachedStudy
from shadho_celery.dashboard.server import Server
from shadho_celery.errors import ServiceError, StoreOutage, StudyNotFound, UsageError
from shadho_celery.fleet.registry import RunningTrial, Share, StudyWants, Worker
from shadho_celery.fleet.state import FleetState
from shadho_celery.session.control import Control, TrialLogs
from shadho_celery.store.base import Turn
from shadho_celery.store.sql import SqlStore

HOST = "http://127.0.0.1:8420"
JSON = {"origin": HOST, "content-type": "application/json"}
TOKEN = "t" * 32
HOSTILE = "</script><img src=x onerror=alert(1)>"
SPACE = {"rate": hp.uniform("rate", 0, 1), "kind": hp.choice("kind", ["tree", HOSTILE])}

Get = Callable[..., Any]


def objective(values: dict[str, Any]) -> float:
    if values["rate"] > 0.8:
        raise ArithmeticError(HOSTILE)
    return float(values["rate"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a store with two studies."""
    path = tmp_path_factory.mktemp("recorded") / "shadho.db"
    for name, seed in (("first", 0), ("second study | 2", 1)):
        options = {"trials": 30, "seed": seed, "store": f"sqlite:///{path}", "study": name, "sampler": "random"}
        shadho_celery.minimize(objective, SPACE, **options)
    return path


class Told(Control):
    """Control that notes what it would send."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[object] = []

    def _ask(self, name: str, deed: Deed) -> Answer:
        self.asked.append((name, deed))
        if isinstance(deed, Pause):
            raise ServiceError("the scheduler does not answer")
        return Answer(is_done=not isinstance(deed, Stop), text=f"{name_of(deed)} it is")

    def drain(self, worker: str) -> Answer:
        return self._ask(worker, Drain(worker))

    def undrain(self, worker: str) -> Answer:
        return self._ask(worker, Undrain(worker))


class Rig:
    """A server over a copy of the store, with a browser that has logged in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock(1000.0)
        self.access = Access(TOKEN)
        self.said: list[str] = []
        self.fleet: Callable[[], list[dict[str, Any]]] = list
        store = SqlStore(f"sqlite:///{path}", read_only=True)
        self.cache = Cache(store, self.clock)
        self.control = Told()
        logs = LogEnds(TrialLogs(), self.clock)
        parts = {"control": self.control, "logs": logs, "clock": self.clock, "say": self.said.append}
        self.server = Server(self.cache, self.access, self.places, **parts)  # type: ignore[arg-type]
        self.client = TestClient(self.server.app, base_url=HOST)
        self.log_in(self.access.new_code())

    def places(self) -> list[dict[str, Any]]:
        return self.fleet()

    def log_in(self, code: str) -> Any:
        return self.client.post("/login", json={"code": code}, headers=JSON)

    def get(self, path: str, status: int = 200) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def rig(recorded: Path, tmp_path: Path) -> Rig:
    path = tmp_path / "shadho.db"
    path.write_bytes(recorded.read_bytes())
    return Rig(path)


def test_a_code_is_exchanged_for_a_cookie_that_scripts_cannot_read(rig: Rig) -> None:
    [next_code] = rig.said
    rig.client.cookies.clear()
    assert rig.client.get("/api/studies").status_code == 401
    cookie = rig.log_in(next_code).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert rig.log_in(next_code).status_code == 401
    for body in (b"", b"[]", b'{"code": 1}', b'{"code": "\xff"}', b"{" * 1000):
        assert rig.client.post("/login", content=body, headers=JSON).status_code == 401


def test_a_login_with_the_token_leaves_the_printed_code(recorded: Path) -> None:
    rig = Rig(recorded)
    [code] = rig.said
    rig.log_in(TOKEN)
    assert rig.said == [code]
    assert rig.log_in(code).status_code == 200
    assert len(rig.said) == 2


@pytest.mark.parametrize("name", ["studies", "study/played", "study/rungs/trials?size=2", "study/rungs/trial/5"])
def test_what_the_pages_get_of_a_study_is_a_golden_text(name: str, tmp_path: Path) -> None:
    """One fact a line: counts, best losses, the best trial as the command line shows it, settings that can change."""
    record_played(tmp_path / "played.db")
    found = Rig(tmp_path / "played.db").get(f"/api/{name}")
    text = json.dumps({**found, **({"now": 0.0} if "now" in found else {})}).replace(str(tmp_path), "")
    text = re.sub(r"checkpoints/[0-9a-f]{16}", "checkpoints/KEY", text)
    check(f"page_{name.partition('?')[0].replace('/', '_')}", re.sub(r'([,{\[] ?)(?="\w+": )', r"\1\n", text))


def test_a_study_whose_name_is_no_word_is_found(rig: Rig) -> None:
    assert rig.get("/api/study/second%20study%20%7C%202")["name"] == "second study | 2"


def test_a_chart_is_a_record_whose_texts_are_data(rig: Rig) -> None:
    chart = rig.get("/api/study/first/chart/slice?label=kind")
    assert HOSTILE in chart["axes"][0]["categories"]
    assert rig.client.get("/api/study/first/chart/slice?label=kind").headers["content-type"] == "application/json"
    failures = rig.get("/api/study/first/chart/failures")
    assert HOSTILE in failures["title"]


def test_a_label_of_any_length_has_a_chart(tmp_path: Path) -> None:
    long = "\u202e l" * 3000
    space = {label: hp.uniform(label, 0, 1) for label in (long, f"{long}2")}
    options = {"trials": 5, "seed": 0, "store": f"sqlite:///{tmp_path}/shadho.db", "study": "first"}
    shadho_celery.minimize(lambda values: values[long], space, **options)
    rig = Rig(tmp_path / "shadho.db")
    labels = rig.get("/api/study/first")["labels"]
    assert len({label["key"] for label in labels}) == 2
    for label in labels:
        assert len(label["text"]) == MOST_CHARACTERS
        assert label["text"].startswith("\\u202e l")
        chart = rig.get(f"/api/study/first/chart/slice?label={label['key']}")
        assert len(chart["series"][0]["columns"]["x"]) == 5
    assert {len(trial["text"]) for trial in rig.get("/api/study/first/trials")["trials"]} == {MOST_CHARACTERS}


@pytest.mark.parametrize(
    ("path", "status", "line"),
    [
        ("/api/study/none", 404, "none"),
        ("/api/study/first/chart/none", 400, "there is no chart 'none'"),
        ("/api/study/first/chart/slice", 400, "chart slice needs label"),
        ("/api/study/first/trial/999", 400, "has no trial 999"),
        (f"/api/study/first/trial/{10**30}", 400, f"has no trial {10**30}"),
        (f"/api/study/first/chart/why_here?number={10**30}", 400, f"has no trial {10**30}"),
        ("/api/study/first/trials?sort=nothing", 400, "cannot be sorted by 'nothing'"),
        ("/api/study/first/trials?page=-1", 400, "page='-1' is not a whole number"),
        ("/api/study/first/trials?size=9999999999999999", 400, "is not a whole number"),
        ("/api/study/first/trials?colour=red", 400, "trials have no filter 'colour'"),
        (
            "/api/study/first/trials?within=loss:low:1",
            400,
            "within='loss:low:1' is not a range of the loss or of a param",
        ),
        ("/api/study/first/trials?within=none:0:1", 400, "is not a range"),
        ("/api/compare?names=first/none", 404, "none"),
        ("/api/compare", 400, "no study is named; give names=FIRST/SECOND"),
        ("/api/compare?names=//", 400, "no study is named"),
    ],
)
def test_a_bad_question_is_one_line(rig: Rig, path: str, status: int, line: str) -> None:
    error = rig.get(path, status)["error"]
    assert line in error
    assert "\n" not in error


def test_the_table_is_sorted_filtered_and_searched_by_the_server(rig: Rig) -> None:
    study = load_study(f"sqlite:///{rig.path}", "first")
    newest = rig.get("/api/study/first/trials?size=4")
    assert [trial["number"] for trial in newest["trials"]] == [29, 28, 27, 26]
    assert newest["count"] == 30
    second = rig.get("/api/study/first/trials?size=4&page=1&sort=number")
    assert [trial["number"] for trial in second["trials"]] == [4, 5, 6, 7]
    best = rig.get("/api/study/first/trials?sort=loss&size=3")
    ranked = sorted(study.trials, key=lambda trial: (trial.merit, trial.number))
    assert [trial["number"] for trial in best["trials"]] == [trial.number for trial in ranked[:3]]
    failed = rig.get("/api/study/first/trials?state=FAILED&size=200")
    assert {trial["state"] for trial in failed["trials"]} == {"FAILED"}
    assert rig.get("/api/study/first/trials?search=onerror")["count"] == failed["count"]
    # A line of a traceback may have this number too.
    assert 7 in {trial["number"] for trial in rig.get("/api/study/first/trials?search=7")["trials"]}
    assert rig.get("/api/study/first/trials?search=nothing")["trials"] == []
    assert rig.get("/api/study/first/trials?size=20&page=99") == rig.get("/api/study/first/trials?size=20&page=1")


def test_the_table_has_columns_of_params_by_which_it_is_sorted_and_filtered(rig: Rig) -> None:
    study = load_study(f"sqlite:///{rig.path}", "first")
    keys = {label["text"]: label["key"] for label in rig.get("/api/study/first")["labels"]}
    number, choice = "rate", next(label for label in keys if label != "rate")
    path = f"/api/study/first/trials?columns={keys[number]},{keys[choice]}&size=200"
    rated = [(trial.params[number], trial.number) for trial in study.trials if number in trial.params]
    found = rig.get(f"{path}&sort={keys[number]}")["trials"]
    assert [trial["number"] for trial in found][: len(rated)] == [each for _, each in sorted(rated)]
    assert found[0]["cells"][0] == min(rated)[0]
    assert isinstance(found[0]["cells"][1], str)
    within = rig.get(f"{path}&within={keys[number]}:0.2:0.5,loss:-inf:0.4")["trials"]
    assert {trial["number"] for trial in within} == {
        trial.number
        for trial in study.trials
        if 0.2 <= trial.params[number] <= 0.5 and trial.loss is not None and trial.loss <= 0.4
    }
    assert [trial["number"] for trial in rig.get("/api/study/first/trials?numbers=3,1,999")["trials"]] == [3, 1]


def test_trials_that_fit_are_downloaded_as_csv_in_the_order_of_the_table(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = rig.client.get("/api/study/first/trials.csv?numbers=1,3")
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = [*csv.DictReader(io.StringIO(answer.text))]
    assert [row["number"] for row in rows] == ["3", "1"]
    monkeypatch.setattr(answers, "MOST_EXPORTED", 1)
    assert "use shadho-celery export first" in rig.get("/api/study/first/trials.csv", 400)["error"]


def test_a_number_or_text_that_json_libraries_refuse_is_sent(rig: Rig) -> None:
    with closing(sqlite3.connect(rig.path)) as database, database:
        database.execute("UPDATE trials SET metrics = ? WHERE number = 3", (f'{{"big": {10**30}, "odd": "\\ud800"}}',))
    found = rig.get("/api/study/first/trial/3")["trial"]["metrics"]
    assert found["big"] == 10**30
    assert rig.get("/api/study/first/trials")["count"] == 30


def test_values_that_only_the_study_s_module_can_create_are_texts(tmp_path: Path) -> None:
    options = [math.sin, int, np.arange(3), (1, 2), {1, 2}, b"x", 1 + 2j]
    path = tmp_path / "shadho.db"
    space = {"kind": hp.choice("kind", options), "rate": hp.uniform("rate", 0, 1)}
    how = {"trials": 20, "seed": 0, "study": "objects", "sampler": "random", "store": f"sqlite:///{path}"}
    shadho_celery.minimize(lambda values: float(values["rate"]), space, **how)
    rig = Rig(path)
    found = rig.get("/api/study/objects/trials?size=20")["trials"]
    kinds = {str(trial["values"]["kind"]) for trial in found}
    assert len(kinds) == len(options), kinds
    assert rig.get("/api/study/objects")["best"]["values"]
    assert all(rig.get(f"/api/study/objects/trial/{number}")["trial"]["values"] for number in range(20))


def test_what_is_written_meanwhile_is_seen_after_half_a_second(rig: Rig) -> None:
    with closing(sqlite3.connect(rig.path)) as database, database:
        database.execute("UPDATE studies SET settings = json_set(settings, '$.trials', 30)")
    assert rig.get("/api/study/first")["ended"] == 30
    with closing(SqlStore(f"sqlite:///{rig.path}")) as store:
        record = store.find("first")
        fence = store.lock(record.key, "test", time.time())
        [last] = store.trials(record.key, [29])
        store.write(record.key, fence, time.time(), Turn(new=[last.evolve(number=30)], changed=[], reported=[]))
        store.unlock(record.key, fence)
    rig.clock.sleep(FRESH_SECONDS)
    found = rig.get("/api/study/first")
    assert (found["ended"], found["asked"]) == (31, 31), "a trial that ran again may exceed the limit of 30"
    listed = {each["name"]: each["asked"] for each in rig.get("/api/studies")["studies"]}
    assert listed == {"first": 31, "second study | 2": 30}
    assert rig.get("/api/study/first/chart/importance")["title"]
    assert rig.get("/api/study/first/trials")["count"] == 31


def test_several_studies_are_compared(rig: Rig) -> None:
    [chart] = rig.get("/api/compare?names=first/second%20study%20%7C%202")
    assert [series["name"] for series in chart["series"]] == ["first", "second study | 2"]


def test_a_damaged_row_is_named_by_what_reads_it_and_charts_are_drawn(rig: Rig) -> None:
    with closing(sqlite3.connect(rig.path)) as database, database:
        database.execute("UPDATE trials SET params = 'x', seconds = 'text' WHERE number = 3")
    assert "number 3" in rig.get("/api/study/first/trials?sort=number&size=5", 503)["error"]
    assert rig.get("/api/study/first/trials?sort=number&size=3")["trials"]
    assert rig.get("/api/study/first/chart/parallel")["title"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@cases(
    ("table", "column", "value"),
    [
        ("trials", "number", "-1"),
        ("trials", "number", "'x'"),
        ("trials", "state", "X'00FF'"),
        ("attempts", "number", "-1"),
        ("attempts", "attempt", "NULL"),
        ("sessions", "since", "1e300"),
    ],
)
def test_if_no_row_of_a_table_can_be_read_each_page_and_command_still_answers(
    rig: Rig, recorded: Path, table: str, column: str, value: str
) -> None:
    """A table without keys may have any value in any column, the same one in all rows too."""
    rig.path.write_bytes(recorded.read_bytes())
    with closing(sqlite3.connect(rig.path)) as database, database:
        database.execute(f"CREATE TABLE damaged AS SELECT * FROM {table}")
        database.execute(f"DROP TABLE {table}")
        database.execute(f"ALTER TABLE damaged RENAME TO {table}")
        database.execute(f"UPDATE {table} SET {column} = {value}")
    damaged = Rig(rig.path)
    needed = {name: each.signature.parameters.values() for name, each in CHARTS.items()}
    plain = [name for name, known in needed.items() if all(each.default is not each.empty for each in known)]
    pages = ["", "/trials?sort=number&size=5", "/trial/0", *(f"/chart/{name}" for name in plain)]
    for page in ["/api/studies", *(f"/api/study/first{page}" for page in pages)]:
        found = damaged.client.get(page)
        assert found.status_code in {200, 400, 503}, (page, found.text)
    for words in (["show"], ["trials"], ["report", "-o", f"{rig.path}.html"]):
        result = CliRunner().invoke(commands, [words[0], "first", *words[1:], "--store", f"sqlite:///{rig.path}"])
        assert isinstance(result.exception, SystemExit | None), (words, result.exception)
        assert result.exit_code in {0, 1, 2}, (words, result.output)


def test_the_fleet_is_what_status_shows_or_the_reason_why_it_is_not_known(rig: Rig) -> None:
    rig.fleet = lambda: [{"folder": "here", "workers": []}]
    [place] = rig.get("/api/fleet")["places"]
    assert place == {"folder": "here", "workers": [], "count": 0, "page": 0, "size": answers.PAGE}

    def silent() -> list[dict[str, Any]]:
        raise ServiceError("Redis does not answer")

    rig.fleet = silent
    rig.clock.sleep(cache.SHARED_SECONDS)
    assert rig.get("/api/fleet") == {"places": [], "trouble": "Redis does not answer"}


def test_what_runs_in_the_slots_of_a_fleet_is_filtered_and_returned_a_page_at_a_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial has its study, owner, slots and expected seconds, as far as they are known. Texts are data."""
    wide = RunningTrial(number=7, started_at=time.time() - 60.0, slots=4, expected=600.0)
    unknown = RunningTrial(number=8, started_at=time.time() - 60.0, rank=1)
    workers = {
        f"{name}@h{place:03}.1.a": Worker(compute_class=name, slots=8, studies={"k": Share(name="svm", slots=8)})
        for place, name in enumerate(["cpu", "gpu"] * 500)
    }
    workers["cpu@busy.1.a"] = Worker(
        compute_class="cpu",
        slots=8,
        busy=5,
        draining=True,
        studies={"k": Share(name=HOSTILE, slots=4, trials=[wide]), "gone": Share(slots=1, trials=[unknown])},
    )
    state = FleetState(
        workers=workers,
        studies={"k": StudyWants(name=HOSTILE, owner="anna@lab", wanted_slots={"gpu": 9000})},
        refused=0,
        drained={},
        depths={"cpu": {}, "gpu": {}},
        ages={"cpu@busy.1.a": 1.0},
    )
    monkeypatch.setattr("shadho_celery.fleet.state.read_fleet", lambda control: state)
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://h")
    monkeypatch.setenv("SHADHO_REDIS_URL", "redis://h")
    rig.fleet = places_of

    def page(query: str = "") -> dict[str, Any]:
        [found] = rig.get(f"/api/fleet{query}")["places"]
        return dict(found)

    first = page()
    assert (first["count"], first["page"], len(first["workers"])) == (1001, 0, answers.PAGE)
    assert {name: each["wanted"] for name, each in first["classes"].items()} == {"cpu": None, "gpu": 9000}
    last = page("?class=gpu&size=200&page=99")
    assert (last["count"], last["page"], len(last["workers"])) == (500, 2, 100), "the last page is shown"
    assert last["workers"][-1]["name"] == "gpu@h999.1.a"
    for text in ("BUSY", "anna", HOSTILE[:20]):
        found = page(f"?{urlencode({'search': text})}")
        assert [each["name"] for each in found["workers"]] == ["cpu@busy.1.a"], text
    [worker] = found["workers"]
    assert (worker["state"], worker["busy"], worker["slots"], worker["age"]) == ("draining", 5, 8, 1.0)
    assert [
        [run[name] for name in ("study", "owner", "trial", "replica", "slots", "expected")] for run in worker["runs"]
    ] == [[HOSTILE, "anna@lab", 7, None, 4, 600.0], ["gone", None, 8, 1, 1, None]]
    assert [round(run["seconds"]) for run in worker["runs"]] == [59, 59], "as of the announcement"
    assert "is not a whole number" in rig.get("/api/fleet?page=x", 400)["error"]


def test_what_studies_have_used_in_a_week_is_read_once_a_minute(rig: Rig) -> None:
    asked: list[float] = []

    uses = [{"owner": "anna", "study": "first", "compute_class": "gpu", "slot_seconds": 7200.0, "money": 5.0}]

    def used(since: float) -> list[dict[str, Any]]:
        asked.append(since)
        return uses

    rig.cache.store.used = used  # type: ignore[method-assign]
    first, again = rig.get("/api/week"), rig.get("/api/week")
    assert (first["uses"], again) == (uses, first)
    assert first["day"]["empty"] == "No worker of a study in this store was live.", "in the day before the manual time"
    rig.clock.sleep(server.WEEK_FRESH_SECONDS)
    assert rig.get("/api/week")["uses"] == uses
    assert [round(later - asked[0]) for later in asked] == [0, server.WEEK_FRESH_SECONDS]


def test_many_requests_share_one_question_to_a_silent_fleet_and_others_do_not_wait(rig: Rig) -> None:
    slow = Slow(lambda: [{"folder": "here"}])
    count, asked = 100, 0

    def ask() -> Any:
        nonlocal asked
        asked += 1
        return slow()

    async def read() -> None:
        transport = httpx2.ASGITransport(app=rig.server.app)
        async with httpx2.AsyncClient(transport=transport, base_url=HOST, cookies=rig.client.cookies) as client:
            waiting = [asyncio.create_task(client.get("/api/fleet")) for _ in range(count)]
            assert await asyncio.to_thread(slow.called.wait, 60)
            waiting[0].cancel()
            assert (await client.get("/api/studies")).json()["studies"]
            rig.clock.sleep(cache.SHARED_SECONDS)
            slow.go.set()
            found = [each.json() for each in await asyncio.gather(*waiting[1:])]
            assert [place["folder"] for each in found for place in each["places"]] == ["here"] * (count - 1)
            await client.get("/api/fleet")
            assert asked == 1
            rig.clock.sleep(cache.SHARED_SECONDS)
            await client.get("/api/fleet")
            assert asked == 2
            await client.post("/api/worker/action", json={"action": "drain", "worker": "w"}, headers=JSON)
            await client.get("/api/fleet")
            assert asked == 3, "what an action has changed is seen at once"

    rig.fleet = ask
    try:
        asyncio.run(asyncio.wait_for(read(), 60))
    finally:
        slow.go.set()


def test_actions_are_asked_for_by_the_studys_key_and_answered(rig: Rig) -> None:
    key = load_study(f"sqlite:///{rig.path}", "first").key

    def act(path: str, **asked: object) -> Any:
        return rig.client.post(path, json=asked, headers=JSON)

    study = "/api/study/first/action"
    assert act(study, action="unpause").json() == {"is_done": True, "text": "unpause it is"}
    assert act(study, action="stop").json() == {"is_done": False, "text": "stop it is"}
    assert act(study, action="cancel", number=3).status_code == 200
    assert act(study, action="set", settings={"trials": 200, "weight": 2.5}).status_code == 200
    assert act(study, action="enqueue", points='{"rate": 0.5}\n\n{"rate": 0.25}\n').status_code == 200
    assert act(study, action="enqueue", points='[{"rate": 0.5}]').status_code == 200
    assert act("/api/worker/action", action="drain", worker="cpu@node7").status_code == 200
    assert act("/api/worker/action", action="undrain", worker="cpu@node7").status_code == 200
    assert rig.control.asked == [
        (key, Unpause()),
        (key, Stop()),
        (key, Cancel(3)),
        (key, Set({"trials": 200, "weight": 2.5})),
        (key, Enqueue([{"rate": 0.5}, {"rate": 0.25}])),
        (key, Enqueue([{"rate": 0.5}])),
        ("cpu@node7", Drain("cpu@node7")),
        ("cpu@node7", Undrain("cpu@node7")),
    ]
    silent = act(study, action="pause")
    assert (silent.status_code, silent.json()) == (503, {"error": "the scheduler does not answer"})


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"action": "delete"},
        {"action": "__init__"},
        {"action": "cancel"},
        {"action": "cancel", "number": -1},
        {"action": "stop", "more": 1},
        {"action": "set", "trials": 3},
        {"action": "enqueue", "points": [{}]},
        {"action": "drain", "worker": "w"},
    ],
)
def test_an_action_that_is_none_is_refused(rig: Rig, asked: dict[str, object]) -> None:
    answer = rig.client.post("/api/study/first/action", json=asked, headers=JSON)
    assert answer.status_code == 400
    assert "there is no such action" in answer.json()["error"]
    assert rig.control.asked == []
    assert rig.client.post("/api/study/first/action", json=asked).status_code == 403


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"action": "set", "settings": {"trials": "many"}}, "trials: 'many' is not a whole number"),
        ({"action": "set", "settings": {"trials": [3]}}, "trials: "),
        ({"action": "set", "settings": {str(number): 1 for number in range(1000)}}, "is not a setting"),
        ({"action": "set", "settings": {"seconds": "nan"}}, "seconds: 'nan' is not a number"),
        ({"action": "set", "settings": {"colour": 1}}, 'STUDY["colour"] is not a setting'),
        ({"action": "set", "settings": {"study": "x", "self": 1}}, 'STUDY["study"] is not a setting'),
        ({"action": "enqueue", "points": '{"rate": 1}\n{rate}'}, "line 2 of the points is not JSON ("),
        ({"action": "enqueue", "points": '{"rate": 1, "rate": 2}'}, "'rate' occurs twice in one object"),
        ({"action": "enqueue", "points": "[" * 100_000}, "the points is not JSON ("),
    ],
)
def test_settings_and_points_are_refused_in_the_words_of_the_commands(
    rig: Rig, asked: dict[str, object], said: str
) -> None:
    answer = rig.client.post("/api/study/first/action", json=asked, headers=JSON)
    assert answer.status_code == 400
    assert said in answer.json()["error"]
    assert rig.control.asked == []


def test_each_page_has_the_buttons_for_what_it_shows_in_its_state(rig: Rig) -> None:
    def shown(found: dict[str, Any]) -> list[tuple[str, dict[str, Any], str | None]]:
        return [(each["text"], each["request"], each["field"]) for each in found["actions"]]

    assert [each["text"] for each in buttons("study", is_held=True, study="s")][:2] == ["unpause", "stop"]
    trial = rig.get("/api/study/first/trial/3")
    assert shown(trial) == [("cancel", {"action": "cancel", "number": 3}, None)]
    assert trial["actions"][0]["question"] == "Stop trial 3 of first?"
    names = {"a": "drained", "b": "draining", "c": "free"}
    workers = [{"name": name, "state": state, "class": "cpu", "runs": []} for name, state in names.items()]
    found = answers.workers_page({"workers": workers}, {})
    assert [each for worker in found["workers"] for each in shown(worker)] == [
        (action, {"action": action, "worker": name}, None)
        for name, action in zip(names, ["undrain", "undrain", "drain"], strict=True)
    ]


def test_pages_show_notes_and_have_a_button_that_adds_one(rig: Rig) -> None:
    """A note on a trial is on its page and on that of the study."""
    control = Control(store=f"sqlite:///{rig.path}")
    for text, trial in (("<b>new</b>", None), ("late", 3)):
        answers.act(control, json.dumps({"action": "note", "text": text, "trial": trial}).encode(), "first")
    study, trial, other = (rig.get(f"/api/study/first{place}") for place in ("", "/trial/3", "/trial/4"))
    assert [(each["text"], each["trial"]) for each in study["notes"]] == [("<b>new</b>", None), ("late", 3)]
    assert (trial["notes"], other["notes"]) == (study["notes"][1:], [])
    assert study["note"][0]["request"] == {"action": "note"}
    [button] = trial["note"]
    assert (button["request"], button["field"]) == ({"action": "note", "trial": 3}, "text")
    assert (button["text"], button["question"]) == ("add a note", "Add a note to trial 3 of first")
    with pytest.raises(UsageError, match="length <= 2000"):
        answers.act(control, json.dumps({"action": "note", "text": "x" * 2001}).encode(), "first")


def test_an_empty_store_has_no_studies(tmp_path: Path) -> None:
    with closing(SqlStore(f"sqlite:///{tmp_path}/shadho.db")) as store:
        store.records()
    found = Rig(tmp_path / "shadho.db").get("/api/studies")
    assert found["studies"] == []
    assert found["first"] == f"shadho-celery run tasks.svm --trials 40 --store sqlite:///{tmp_path}/shadho.db"


def test_the_pages_and_their_scripts_are_served(rig: Rig) -> None:
    page = rig.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for name in ("/static/app.js", "/static/dashboard.css", "/pages/figure.js", "/pages/vendor/echarts/echarts.min.js"):
        assert rig.client.get(name).status_code == 200
    for name in ("/static/../server.py", "/static/%2e%2e/server.py", "/pages/../report.py", "/static/nothing.js"):
        assert rig.client.get(name).status_code == 404


def test_files_that_an_installer_has_linked_are_served(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STATIC", "PAGES"):
        (tmp_path / name).mkdir()
        for path in getattr(server, name).iterdir():
            (tmp_path / name / path.name).symlink_to(path)
        monkeypatch.setattr(server, name, tmp_path / name)
    client = TestClient(rig.server.app, base_url=HOST)
    assert [client.get(name).status_code for name in ("/", "/static/app.js", "/pages/style.css")] == [200] * 3


def test_a_file_is_sent_compressed_once_and_not_again(rig: Rig) -> None:
    for name, kind in (("/", "text/html"), ("/static/app.js", "text/javascript"), ("/pages/style.css", "text/css")):
        plain = rig.client.get(name, headers={"accept-encoding": "identity"})
        small = rig.client.get(name, headers={"accept-encoding": "gzip, br"})
        assert small.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert small.content == plain.content
        assert small.headers["content-type"].startswith(kind)
        assert int(small.headers["content-length"]) < len(plain.content)
        again = rig.client.get(name, headers={"if-none-match": small.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert rig.client.get(name, headers={"if-none-match": '"another"'}).status_code == 200


def imported(address: str) -> set[str]:
    """Return the addresses of all modules that a module of the pages imports."""
    room, _, name = address.lstrip("/").partition("/")
    text = ({"static": server.STATIC, "pages": server.PAGES}[room] / name).read_text()
    own = {f"/{room}/{name[2:]}" if name.startswith("./") else name for name in re.findall(r'from "(.+)"', text)}
    return own.union(*map(imported, own))


def test_the_page_fetches_all_its_modules_at_once(rig: Rig) -> None:
    page = rig.client.get("/").text
    assert {*re.findall(r'modulepreload" href="(.+)"', page)} == imported("/static/app.js")
    assert page.index("app.js") < page.index("echarts.min.js"), "data are asked for before the library is run"


def test_a_fault_of_one_answer_is_one_line_and_hides_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(answers, "chart_by_name", fails)
    client = TestClient(rig.server.app, base_url=HOST, cookies=rig.client.cookies, raise_server_exceptions=False)
    found = client.get("/api/study/first/chart/history")
    assert found.status_code == 500
    assert "ZeroDivisionError('of all things')" in found.json()["error"]
    assert found.headers["content-security-policy"]
    assert found.headers["cache-control"] == "no-store"
    assert client.get("/api/study/first").status_code == 200


@pytest.mark.parametrize("sort", ["seconds", "-seconds", "loss", "-loss"])
def test_trials_without_a_value_come_last_in_both_orders(rig: Rig, sort: str) -> None:
    with closing(sqlite3.connect(rig.path)) as database, database:
        database.execute("UPDATE trials SET seconds = NULL WHERE state = 'FAILED'")
    found = rig.get(f"/api/study/first/trials?sort={sort}&size=100")["trials"]
    values = [trial[sort.removeprefix("-")] for trial in found]
    known = [value for value in values if value is not None]
    assert len(known) < 30
    assert values[: len(known)] == known


class Slow:
    """A function that waits, once it is called, until `go` is set."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.called, self.go = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called.set()
        assert self.go.wait(60)
        return self._function(*args, **kwargs)


def test_a_stream_of_events_does_not_wait_while_another_request_reads_the_store(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, slow = rig.cache.study("first"), Slow(rig.cache.store.change)
    monkeypatch.setattr(rig.cache.store, "change", slow)
    reader = threading.Thread(target=study.trials)
    reader.start()
    try:
        assert slow.called.wait(60)
        assert study.look() == "0"
    finally:
        slow.go.set()
        reader.join()
    assert study.look() != "0"


def test_trials_are_shown_while_the_attempts_are_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    study, slow = rig.cache.study("first"), Slow(rig.cache.store.rows_of_attempts)
    monkeypatch.setattr(rig.cache.store, "rows_of_attempts", slow)
    reader = threading.Thread(target=study.attempts)
    reader.start()
    try:
        assert slow.called.wait(60)
        assert len(study.trials()) == 30
    finally:
        slow.go.set()
        reader.join()


class Reads:
    """Notes which columns are read of the store, and after which change number."""

    def __init__(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[set[str], int]] = []
        for name in ("rows_of_trials", "rows_of_attempts"):
            read = getattr(store, name)

            def noted(key: str, names: Sequence[str], since: int = 0, read: Callable[..., Any] = read) -> Any:
                self.found.append(({*names}, since))
                return read(key, names, since)

            monkeypatch.setattr(store, name, noted)


def test_only_what_a_page_needs_is_read_and_only_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(rig.cache.store, monkeypatch)
    for path in ("", "/chart/history", "/trials"):
        rig.get(f"/api/study/first{path}")
    [(brief, since)] = reads.found
    assert since == 0
    assert brief == {
        "number",
        "state",
        "loss",
        "budget",
        "violation",
        "started_at",
        "finished_at",
        "compute_class",
        "sampler",
    }
    for path in ("/chart/throughput", "/chart/curves", "/trials?sort=seconds", "/chart/timeline"):
        rig.get(f"/api/study/first{path}")
    assert len(reads.found) == 3
    facts = next(names for names, _ in reads.found[1:] if "subspace" in names)
    assert not facts & {"params", "error", "loss"}
    for path in ("/chart/parallel", "/chart/failures", "/chart/slice?label=rate", "/trials?search=x"):
        rig.get(f"/api/study/first{path}")
    assert len(reads.found) == 4
    assert reads.found[-1][0] == {"number", "params", "losses", "error", "code"}


def test_what_changes_while_deeper_facts_are_read_is_not_missed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    study = rig.cache.study("first")
    study.trials(Depth.LOSSES)
    read = rig.cache.store.rows_of_trials

    def meanwhile(key: str, names: Sequence[str], since: int = 0) -> Any:
        blocks = [*read(key, names, since)]
        if not since:
            with closing(SqlStore(f"sqlite:///{rig.path}")) as store:
                fence = store.lock(key, "test", time.time())
                [last] = store.trials(key, [29])
                store.write(key, fence, time.time(), Turn(new=[last.evolve(number=30)], changed=[], reported=[]))
                store.unlock(key, fence)
            rig.clock.sleep(FRESH_SECONDS)
            assert len(study.trials(Depth.LOSSES)) == 31, "brief facts are there meanwhile"
        return blocks

    monkeypatch.setattr(rig.cache.store, "rows_of_trials", meanwhile)
    found = study.trials(Depth.PARAMS)
    assert len(found) == 31
    assert found.seconds[30] == found.seconds[29]
    assert found.labels["rate"].values[30] == found.labels["rate"].values[29]


def test_trials_and_attempts_that_were_known_are_not_read_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for chart in ("parallel", "timeline"):
        rig.get(f"/api/study/first/chart/{chart}")
    before, reads = rig.cache.study("first").change, Reads(rig.cache.store, monkeypatch)
    with closing(SqlStore(f"sqlite:///{rig.path}")) as store:
        record = store.find("first")
        fence = store.lock(record.key, "test", time.time())
        [last] = store.trials(record.key, [29])
        times = {"started_at": last.started_at, "ended_at": last.finished_at}
        attempts = [AttemptRecord(number=30, attempt=1, compute_class="cpu", **times)]
        store.write(record.key, fence, time.time(), Turn(new=[last.evolve(number=30)], attempted=attempts))
        store.unlock(record.key, fence)
    rig.clock.sleep(FRESH_SECONDS)
    assert rig.get("/api/study/first/chart/parallel")["title"].startswith("The params of 2")
    assert rig.get("/api/study/first/chart/timeline")["title"].startswith("31 attempts")
    assert [since for _, since in reads.found] == [before, before]


def events(rig: Rig, count: int) -> list[str]:
    """Return the first events of the study `first`, or all if the stream ends earlier."""

    async def read() -> list[str]:
        scope = {"type": "http", "path_params": {"name": "first"}, "headers": []}
        stream: AsyncIterator[Any] = (await rig.server.events(Request(scope))).body_iterator  # type: ignore[attr-defined]
        found = []
        async for event in stream:
            found.append(str(event))
            if len(found) == count:
                break
        return found

    return asyncio.run(asyncio.wait_for(read(), 60))


def test_a_stream_of_events_outlasts_an_outage_of_the_store(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    results = iter(["5", StoreOutage("gone"), StoreOutage("gone"), "6"])

    def look(_: CachedStudy) -> str:
        found = next(results)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(CachedStudy, "look", look)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.001)
    told = [("message", "5"), ("trouble", "gone"), ("message", "6")]
    assert events(rig, 3) == [f"event: {name}\ndata: {text}\n\n" for name, text in told]
    assert [record.message for record in caplog.records] == ["gone"]


def test_a_store_that_a_newer_version_migrates_meanwhile_is_named(rig: Rig) -> None:
    rig.get("/api/study/first")
    with closing(sqlite3.connect(rig.path)) as database, database:
        database.execute("UPDATE schema_version SET version = 3")
        database.execute("ALTER TABLE trials DROP COLUMN seconds")
    rig.clock.sleep(FRESH_SECONDS)
    for path in ("/api/studies", "/api/study/first", "/api/study/first/chart/throughput", "/api/study/first/trial/3"):
        error = rig.get(path, 503)["error"]
        assert "its tables are of version 3, not 2; install the shadho_celery that wrote it" in error


def test_a_stream_of_events_ends_with_its_study(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(_: CachedStudy) -> str:
        raise StudyNotFound("deleted")

    monkeypatch.setattr(CachedStudy, "look", look)
    assert events(rig, 1) == []


def test_a_study_that_was_deleted_is_not_taken_for_another_one(rig: Rig) -> None:
    study = rig.cache.study("first")
    assert study.refresh() > 0
    with closing(sqlite3.connect(rig.path)) as database, database:
        database.execute("DELETE FROM studies WHERE name = 'first'")
        database.execute("UPDATE studies SET name = 'first, again'")
    rig.clock.sleep(FRESH_SECONDS)
    with pytest.raises(StudyNotFound):
        study.refresh()


def test_answers_are_kept_until_the_study_changes_or_for_two_seconds_while_it_runs(rig: Rig) -> None:
    study, made = rig.cache.study("first"), iter(range(10))

    def found(seconds: float) -> list[int]:
        answers = []
        for _ in range(2):
            answers.append(study.answer("what", lambda: next(made)))
            rig.clock.sleep(seconds)
        return answers

    with closing(SqlStore(f"sqlite:///{rig.path}")) as store:
        record = store.find("first")
        fence = store.lock(record.key, "test", time.time())
        study.answer("slow", lambda: rig.clock.sleep(FRESH_ANSWERS))
        study.answer("slow", lambda: pytest.fail("the time is counted from the end of the work"))
        assert found(0.1) == [0, 0]
        assert found(FRESH_ANSWERS) == [0, 1]
        store.unlock(record.key, fence)
        # What was said of the running study is not said of the ended one.
        assert found(FRESH_ANSWERS) == [2, 2]
        fence = store.lock(record.key, "test", time.time())
        [last] = store.trials(record.key, [29])
        store.write(record.key, fence, time.time(), Turn(new=[last.evolve(number=30)], changed=[], reported=[]))
        store.unlock(record.key, fence)
    assert found(0.1) == [3, 3]


def test_a_study_that_begins_or_ends_to_run_is_a_change_without_a_trial(rig: Rig) -> None:
    study, seen = rig.cache.study("first"), []
    with closing(SqlStore(f"sqlite:///{rig.path}")) as store:
        record = store.find("first")
        for _ in range(2):
            seen.append((study.look(), rig.get("/api/study/first")["state"]))
            fence = store.lock(record.key, "test", time.time())
            rig.clock.sleep(FRESH_SECONDS)
            seen.append((study.look(), rig.get("/api/study/first")["state"]))
            store.unlock(record.key, fence)
            rig.clock.sleep(FRESH_SECONDS)
    assert [state for _, state in seen] == ["ended", "running"] * 2
    assert len({look for look, _ in seen}) == 2


def test_the_list_of_studies_has_what_is_written_meanwhile(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are read again only of a study that has changed."""
    first = rig.get("/api/studies")["studies"][1]
    asked: list[str] = []
    counts = rig.cache.store.counts
    monkeypatch.setattr(rig.cache.store, "counts", lambda key: asked.append(key) or counts(key))
    with closing(SqlStore(f"sqlite:///{rig.path}")) as store:
        record = store.find("first")
        fence = store.lock(record.key, "test", time.time())
        [last] = store.trials(record.key, [29])
        store.write(record.key, fence, time.time(), Turn(new=[last.evolve(number=30)]))
        now = rig.get("/api/studies")["studies"][1]
        store.unlock(record.key, fence)
    assert sum(now["counts"].values()) == sum(first["counts"].values()) + 1
    last_states = [first["state"], now["state"], rig.get("/api/studies")["studies"][1]["state"]]
    assert last_states == ["ended", "running", "ended"]
    assert asked == [record.key] * 2


def test_a_best_trial_that_is_damaged_is_named_in_one_line(rig: Rig) -> None:
    number = load_study(f"sqlite:///{rig.path}", "first").best.number
    with closing(sqlite3.connect(rig.path)) as database, database:
        database.execute("UPDATE trials SET params = 'x' WHERE number = ?", (number,))
    assert f"number {number})" in rig.get("/api/studies", 503)["error"]
