"""The recorder keeps what is new until it was written, and says why workers left."""

from __future__ import annotations

from shadho_celery.core.hardware import Gpu
from shadho_celery.core.records import Leaving, MachineRecord, Placed, Present, SessionRecord, pack, unpack
from shadho_celery.study.recorder import Recorder


def present(name: str) -> Present:
    return Present("cpu", 2, MachineRecord(host=name))


def test_predictions_survive_packing_as_numbers_of_32_bits() -> None:
    found = {"a": Placed(1.5, 0.0, None), "c": Placed(1e300, -1.0, 0.25)}
    packed = pack(found, ["a", "b", "c", "d"])
    assert len(packed) == 3 * 12
    read = unpack(packed, ["a", "b", "c", "d"])
    assert (read["a"], [*read]) == (found["a"], ["a", "c"])
    assert read["c"].seconds is not None
    assert read["c"].seconds > 1e38, "the greatest number instead of an infinite one"
    assert unpack(packed, ["a"]) == {"a": found["a"]}, "a class that is not known yet is left out"
    assert unpack(b"123", ["a"]) == unpack(None, []) == {}


def test_a_machine_has_the_gpus_of_all_its_workers() -> None:
    recorder = Recorder()
    large, small = Gpu(id="10", name="A100"), Gpu(id="2", name="T4")
    of = {"a": (large,), "b": (small,), "c": (large, small)}
    recorder.see({*of}, 1.0, lambda name: Present("gpu", 1, MachineRecord(host="h", gpus=of[name])))
    *_, last = [each for each in recorder.seen if isinstance(each, MachineRecord)]
    assert last.gpus == (small, large), "in the order of their ids"


def test_a_worker_that_stays_is_recorded_once_and_its_machine_once() -> None:
    recorder = Recorder()
    recorder.see({"n"}, 1.0, present)
    assert [type(each) for each in recorder.seen] == [MachineRecord, SessionRecord]
    recorder.clear()
    recorder.see({"n"}, 2.0, present)
    assert not recorder.is_urgent
    recorder.see(set(), 0.5, present, lambda name: Leaving.STOPPED)
    [session] = recorder.seen
    assert isinstance(session, SessionRecord)
    assert (session.until, session.reason) == (1.0, Leaving.STOPPED), "although the clock was set back"


def test_a_worker_that_announces_no_price_has_that_of_its_class() -> None:
    recorder, prices = Recorder(), {"a": None, "b": 0.5, "c": 0.0}
    recorder.class_prices = {"gpu": 2.4}
    recorder.see({*prices}, 1.0, lambda name: Present("gpu", 1, MachineRecord(host=name), prices[name]))
    assert {each.worker: each.price for each in recorder.sessions} == {"a": 2.4, "b": 0.5, "c": 0.0}


def test_a_worker_whose_number_of_slots_changes_has_a_session_for_each_number_once_a_minute() -> None:
    """Trials that share a GPU change it often."""
    recorder, slots = Recorder(), {"n": 1, "m": 2}

    def shared(name: str) -> Present:
        return Present("gpu", slots[name], MachineRecord(host=name))

    recorder.see({*slots}, 0.0, shared)
    recorder.follow(0.0, shared, {})
    recorder.clear()
    for second in range(1, 200):
        slots["n"] = 1 + second % 7
        recorder.follow(float(second), shared, {})
    found = [each for each in recorder.seen if isinstance(each, SessionRecord)]
    assert {each.worker for each in found} == {"n"}, "the other one has not changed"
    ended = [(each.since, each.until, each.slots, each.reason) for each in found if each.until is not None]
    assert ended == [
        (0.0, 60.0, 1, Leaving.RESIZED),
        (60.0, 120.0, 5, Leaving.RESIZED),
        (120.0, 180.0, 2, Leaving.RESIZED),
    ]
    assert [(each.since, each.slots) for each in recorder.sessions if each.worker == "n"] == [(180.0, 6)]
    assert recorder.preemptions(180.0) == {"gpu": (0, 360 / 3600)}


def test_slots_of_other_studies_are_recorded_as_means_whose_number_grows_with_the_logarithm_of_the_time() -> None:
    """A worker whose slots change hands each second has few records; one that no other study uses has none."""
    recorder, week = Recorder(), 7 * 86400
    recorder.see({"n", "m", "own"}, 0.0, present)
    recorder.clear()
    for second in range(1, week, 1):
        # From the second hour on, another study has a slot of both, and a third one of one of them half of the time.
        others = {"n": 1 + second % 2, "m": 1} if second > 3600 else {}
        recorder.follow(float(second), present, others)
        recorder.clear()
    found = {each.worker: each for each in recorder.sessions}
    assert found["own"].others == ()
    assert found["m"].others == ((3601.0, 1.0),), "the last number goes on"
    assert 1 < len(found["n"].others) < 600
    assert {round(slots, 1) for _, slots in found["n"].others} == {1.5}
    recorder.follow(week, present, {})
    recorder.see({"own"}, week + 5000.0, present)
    [ended] = [
        each
        for each in recorder.seen
        if isinstance(each, SessionRecord) and (each.worker, each.until) == ("m", week + 5000.0)
    ]
    assert ended.others[-1] == (week, 0.0), "from the time of the change on"


def test_preempted_and_vanished_workers_are_counted_by_class_with_the_hours_of_all_workers() -> None:
    recorder = Recorder()
    recorder.see({"a", "b", "c"}, 0.0, present)
    recorder.see({"a", "b"}, 3600.0, present, lambda name: Leaving.PREEMPTED)
    recorder.see({"a"}, 7200.0, present, lambda name: Leaving.STOPPED)
    assert recorder.preemptions(10_800.0) == {"cpu": (1, 6.0)}
    again = Recorder()
    again.recall([each for each in recorder.seen if isinstance(each, SessionRecord)])
    assert again.preemptions(0.0) == {"cpu": (1, 3.0)}, "those of earlier runs, as far as they have ended"
