"""Announcements as they are read; how they come and go is integration's business."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import ValidationError, convert
from services.cases import cases

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.hardware import Machine
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.registry import (
    Progress,
    StudyWants,
    Worker,
    able,
    keys_of,
    obeyed_drains,
    sorted_out,
    unable,
    wanted_slots,
)
from shadho_celery.fleet.signing import UNSIGNED, Signer

SIGNER = Signer(b"a key of sixteen bytes")


@cases("place", ["a b:1", "http://h:1", "h", "h:123456", "h:1\n", "[x]:1", "x" * 256 + ":1"])
def test_an_announcement_whose_metrics_have_no_address_is_malformed(place: str) -> None:
    for kind in (Worker, StudyWants):
        assert convert({"metrics": "node-7.example:9432"}, kind).metrics
        assert convert({"metrics": "[2001:db8::1]:9432"}, kind).metrics
        with pytest.raises(ValidationError):
            convert({"metrics": place}, kind)


def worker(**facts: Any) -> Worker:
    return Worker(**{"protocol": PROTOCOL, "compute_class": "cpu", "imports": ["my_study"], **facts})


def test_a_worker_can_that_has_the_module_speaks_our_protocol_and_signs_with_our_key() -> None:
    workers = {
        "good": worker(),
        "another module": worker(imports=["other"]),
        "older": worker(protocol=PROTOCOL - 1),
        "with a key": worker(key="12345678"),
        "with two": worker(key="87654321", keys=("87654321", "12345678")),
        "draining": worker(draining=True),
    }
    assert able(workers, "my_study").keys() == {"good"}
    assert able(workers, "my_study", "12345678").keys() == {"with a key", "with two"}
    assert able(workers, "my_study", "87654321").keys() == {"with two"}
    assert unable(workers, "my_study") is None


def test_who_obeys_a_key_obeys_it_in_a_rotation_too_and_who_refuses_control_obeys_none() -> None:
    both = Signer(b"another key of a fleet", b"a key of sixteen bytes")
    of_fleet, of_machine = worker(**keys_of(both, both)), worker(**keys_of(UNSIGNED, SIGNER))
    assert [of_fleet.obeys(key) for key in (*both.fingerprints, "12345678", "")] == [True, True, False, False]
    assert [of_machine.obeys(key) for key in (SIGNER.fingerprint, both.fingerprint, "")] == [True, False, False]
    assert [worker(**keys_of(UNSIGNED, UNSIGNED)).obeys(key) for key in ("", "12345678")] == [True, False]
    assert not any(worker(**keys_of(both, None)).obeys(key) for key in (*both.fingerprints, ""))


@pytest.mark.parametrize(
    ("workers", "fingerprint", "words"),
    [
        ({}, "", ["no worker is live", "SHADHO_IMPORTS=my_study"]),
        (
            {"cpu@h.1.aaaa": worker(draining=True, drained=True)},
            "",
            ["all live workers are drained", "shadho-celery undrain cpu@h"],
        ),
        ({"a": worker(draining=True)}, "", ["no worker is live", "SHADHO_IMPORTS=my_study"]),
        ({"a": worker(imports=[])}, "", ["no live worker has my_study", "-Q cpu"]),
        ({"a": worker(protocol=PROTOCOL - 1)}, "", [f"protocol {PROTOCOL - 1}", f"this scheduler {PROTOCOL}"]),
        (
            {"a": worker(protocol=1), "b": worker(protocol=PROTOCOL + 1), "c": worker(imports=[])},
            "",
            [f"protocol 1, {PROTOCOL + 1}", f"this scheduler {PROTOCOL}", "same version"],
        ),
        ({"a": worker(key="12345678")}, "", ["--signing-key-file"]),
        ({"a": worker()}, "12345678", ["--signing-key-file"]),
        ({"a": worker(key="12345678")}, "87654321", ["--signing-key-file"]),
        ({"a": worker(key="1", protocol=1), "b": worker(key="1")}, "", ["--signing-key-file"]),
    ],
)
def test_where_none_can_the_reason_and_the_remedy_are_told_in_one_line(
    workers: dict[str, Worker], fingerprint: str, words: list[str]
) -> None:
    told = str(unable(workers, "my_study", fingerprint))
    assert all(word in told for word in words), told
    assert "\n" not in told


def test_for_code_that_is_shipped_the_remedy_is_a_worker_that_accepts_it() -> None:
    shipped = CodeVersion(is_shipped=True)
    for live in ({}, {"a": worker(imports=[])}):
        told = str(unable(live, "my_study", code=shipped, compute_class="cpu"))
        assert told.endswith("SHADHO_ACCEPT_CODE=1 celery -A shadho_celery worker -Q cpu")


def test_the_remedy_names_the_class_of_the_study_if_such_workers_live() -> None:
    live = {
        name: Worker(protocol=PROTOCOL, compute_class=name, imports=["x"], slots=1) for name in ("cpu", "gpu_large")
    }
    for first, name in (("gpu_large", "gpu_large"), ("gpu_small", "cpu")):
        assert str(unable(live, "my_study", compute_class=first)).endswith(f"-Q {name}")


def test_workers_that_do_not_sign_with_our_key_are_the_reason_though_their_announcements_are_refused() -> None:
    told = str(unable({}, "my_study", "12345678", refused=1))
    assert "--signing-key-file" in told
    assert "no worker is live" not in told


def test_a_function_by_value_needs_a_worker_that_accepts_code_with_the_same_key() -> None:
    shipped = CodeVersion(digest="0123456789ab", is_shipped=True)
    told = str(unable({"one": worker()}, "f_1.pickle", code=shipped))
    command = "SHADHO_ACCEPT_CODE=1 celery -A shadho_celery worker -Q cpu"
    assert told == f"no live worker accepts code (--accept-code); start one: {command}"
    workers = {"one": worker(accepts_code=True, key="12345678")}
    assert "sign with another key" in str(unable(workers, "f_1.pickle", code=shipped))
    assert unable(workers, "f_1.pickle", "12345678", shipped) is None


OURS = CodeVersion(root="/ours", files={"my_study.py": "0123456789ab"}).with_space({})


def test_a_worker_with_another_version_of_the_code_or_without_it_is_not_able_and_the_reason_is_told() -> None:
    edited = CodeVersion(root="/theirs", files={"my_study.py": "ba9876543210"}).with_space({})
    machine = {"host": "node7"}
    workers = {
        "same": worker(codes={"my_study": OURS}),
        "unknown": worker(codes={"another_study": edited}),
        "other": worker(codes={"my_study": edited}, machine=Machine(**machine)),
        "broken": worker(codes={"my_study": edited.with_problem("No module named 'torch'")}),
        "older": worker(codes={"my_study": edited}, protocol=PROTOCOL - 1),
    }
    assert able(workers, "my_study", code=OURS).keys() == {"same", "unknown"}
    assert unable(workers, "my_study", code=OURS) is None
    told = sorted_out(workers, "my_study", "", OURS)[1]
    assert told.keys() == {"other", "broken"}
    assert all(word in told["other"] for word in ("node7", "/theirs/my_study.py", OURS.digest, edited.digest))
    assert "No module named 'torch'" in told["broken"]
    lacking = str(unable({"other": workers["other"]}, "my_study", code=OURS))
    assert "the study waits" in lacking
    assert "/theirs/my_study.py" in lacking


def test_the_latest_drain_that_a_worker_of_a_place_obeys_counts() -> None:
    sequences = {"cpu@h.1.a": 5, "cpu@h.2.b": 3, "cpu@i.1.c": 0}
    assert obeyed_drains({name: worker(drain_sequence=each) for name, each in sequences.items()}) == {"cpu@h": 5}


@cases(
    "studies, slots",
    [
        ([], {}),
        # Up to the live slots of workers that do not drain, however many studies want them.
        ([StudyWants(wants={"cpu": 3.0})], {"cpu": 2}),
        ([StudyWants(wants={"cpu": 2.0}), StudyWants(wants={"cpu": 2.0})], {"cpu": 2}),
        # What is in flight, and what waits.
        (
            [StudyWants(wants={"cpu": 0.0, "gone": 1.0}, progress=Progress(sendable_slots=1))],
            {"cpu": 1, "gone": 0},
        ),
        ([StudyWants(wants={"cpu": 2.0}, wanted_slots={"cpu": 5, "new": 4})], {"cpu": 5, "new": 4}),
        ([StudyWants(wanted_slots={"cpu": 1}), StudyWants(wants={"cpu": 2.0})], {"cpu": 2}),
    ],
)
def test_only_on_demand_are_more_slots_wanted_than_live_ones(studies: list[StudyWants], slots: dict[str, int]) -> None:
    live = [worker(slots=1), worker(slots=1), worker(slots=7, draining=True)]
    assert wanted_slots(studies, live) == slots
