"""A machine's facts are what this process may use of it, and its class and slots follow from them."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import pytest
from services.cases import cases

from shadho_celery.core.hardware import (
    DEFAULT_CLASSES,
    LARGE_GPU_BYTES,
    THREAD_VARIABLES,
    ComputeClass,
    Gpu,
    Machine,
    by_strength,
    check_class_name,
    detect,
    gpus_text,
    kinds_of,
    price,
    shortages,
    slots_per_gpu,
    uses_gpus,
)
from shadho_celery.core.trial import Memory
from shadho_celery.errors import UsageError

GIB = 2**30


def machine(cores: int = 8, gpus: int = 0, gpu_memory: int = 0) -> Machine:
    cards = tuple(Gpu(name="A100", id=str(number), memory=gpu_memory) for number in range(gpus))
    return Machine(host="h", cores=cores, memory=64 * GIB, cards=cards)


# Class and slots


@pytest.mark.parametrize(
    ("gpus", "gpu_memory", "compute_class"),
    [
        (0, 0, "cpu"),
        (1, LARGE_GPU_BYTES, "gpu_large"),
        (1, LARGE_GPU_BYTES - 1, "gpu_small"),
        (4, 80 * GIB, "gpu_large"),
    ],
)
def test_gpus_and_their_memory_make_the_class(gpus: int, gpu_memory: int, compute_class: str) -> None:
    assert machine(gpus=gpus, gpu_memory=gpu_memory).compute_class == compute_class


@pytest.mark.parametrize(
    ("cores", "gpus", "compute_class", "cores_per_trial", "slots"),
    [
        (8, 2, "gpu_large", 1, 2),
        (8, 2, "gpu_large", 4, 2),
        (8, 2, "cpu", 1, 8),
        (8, 2, "cpu_big", 4, 2),
        (8, 0, "gpu_large", 1, 8),
        (8, 0, "cpu", 3, 2),
        (2, 0, "cpu", 16, 1),
        (8, 0, "cpu", 0, 8),
        (8, 2, "größte", 1, 2),
    ],
)
def test_there_is_one_slot_a_gpu_else_one_for_each_trials_cores(
    cores: int, gpus: int, compute_class: str, cores_per_trial: int, slots: int
) -> None:
    assert machine(cores, gpus, 80 * GIB).slots_for(compute_class, cores_per_trial) == slots


@pytest.mark.parametrize(
    ("told", "cores", "slots"), [("", 8, 2), ("3", 8, 6), ("auto", 8, 8), ("auto", 1, 2), ("auto", 99, 16)]
)
def test_a_gpu_has_as_many_slots_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, told: str, cores: int, slots: int
) -> None:
    """With auto, they are the most that there may be."""
    monkeypatch.setenv("SHADHO_SLOTS_PER_GPU", told)
    assert machine(cores, 2, 80 * GIB).slots_for("gpu") == slots
    assert machine(cores, 2, 80 * GIB).slots_for("cpu") == cores


@pytest.mark.parametrize("told", ["0", "-1", "1.5", "1000", "all"])
def test_a_wrong_number_of_slots_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv("SHADHO_SLOTS_PER_GPU", told)
    with pytest.raises(UsageError, match="give a number from 1 to 999, or auto"):
        slots_per_gpu()


def test_each_slot_sees_one_gpu_and_its_share_of_the_cores() -> None:
    environments = [machine(8, 2, 80 * GIB).slot_environment("gpu_large", [slot], 2) for slot in range(2)]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["0", "1"]
    assert all(environment[name] == "4" for environment in environments for name in THREAD_VARIABLES)
    assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} <= set(THREAD_VARIABLES)


def test_more_slots_than_gpus_share_them_in_turn_and_more_slots_than_cores_get_one_thread() -> None:
    environments = [machine(2, 2, 80 * GIB).slot_environment("gpu", [slot], 5) for slot in range(5)]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["0", "1", "0", "1", "0"]
    assert environments[0]["OMP_NUM_THREADS"] == "1"


def worker_on(processors: int, slots: int, *, limit: int = 0, cores: int = 0, pool: str = "p") -> tuple[Machine, int]:
    """Facts and slots of a worker that may run on the processors whose bits are set."""
    count = limit or cores or processors.bit_count()
    return Machine(cores=count, processors=f"{processors:x}", pool=pool, is_limited=bool(limit)), slots


@cases(
    "own, neighbours, threads",
    [
        (worker_on(0xFF, 1), [], 8),
        (worker_on(0b11, 1), [worker_on(0b11, 1)], 1),
        (worker_on(0xFF, 1), [worker_on(0xFF, 3)], 2),
        (worker_on(0xFF, 2), [worker_on(0xFF, 1)], 2),
        (worker_on(0b11, 2), [worker_on(0b11, 2)], 1),
        # Of other processors, another host, or of nothing that is known.
        (worker_on(0x0F, 1), [worker_on(0xF0, 4)], 4),
        (worker_on(0xFF, 1), [worker_on(0xFF, 1, pool="q")], 8),
        (worker_on(0, 2, cores=8, pool=""), [worker_on(0xFF, 8, pool="")], 4),
        (worker_on(0xFF, 1), [worker_on(0, 7)], 8),
        # Two of them are the other's, too: it uses each of them as much as this one's slot uses all.
        (worker_on(0xFF, 1), [worker_on(0b11, 1)], 6),
        (worker_on(0b11, 1), [worker_on(0xFF, 1)], 1),
        # A limited one keeps its own, and the others share the rest.
        (worker_on(0xFF, 2, limit=4), [worker_on(0xFF, 8)], 2),
        (worker_on(0xFF, 1), [worker_on(0xFF, 4, limit=4), worker_on(0xFF, 1)], 2),
        (worker_on(0xFF, 1), [worker_on(0xFF, 9, limit=8), worker_on(0xFF, 9, limit=8)], 1),
        # A quota of 4 of 64 processors.
        (worker_on(2**64 - 1, 1, cores=4), [worker_on(2**64 - 1, 1, cores=4)], 2),
        (worker_on(2**64 - 1, 1, cores=4), [worker_on(2**64 - 1, 1, limit=1)], 3),
        *((worker_on(2**cores - 1, 1), [worker_on(2**cores - 1, 2)], cores // 3) for cores in (3, 48, 96, 192)),
    ],
)
def test_the_slots_of_a_hosts_workers_share_its_cores(
    own: tuple[Machine, int], neighbours: list[tuple[Machine, int]], threads: int
) -> None:
    machine, slots = own
    assert machine.threads(slots, neighbours) == threads


def test_a_cpu_class_on_a_gpu_machine_sees_no_gpu() -> None:
    assert machine(8, 2, 80 * GIB).slot_environment("cpu", [0], 8)["CUDA_VISIBLE_DEVICES"] == ""
    assert machine(8).slot_environment("gpu_large", [0], 1)["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("name", "uses"), [("cpu", False), ("cpu_big", False), ("gpu_large", True), ("größte", True)])
def test_every_class_uses_the_gpus_but_those_named_cpu(name: str, uses: bool) -> None:
    assert uses_gpus(name) is uses
    assert [gpu.id for gpu in machine(8, 2, 80 * GIB).gpus_for(name)] == (["0", "1"] if uses else [])
    assert machine(8).gpus_for(name) == ()


def test_the_facts_travel_as_json() -> None:
    facts = json.loads(json.dumps(msgspec.to_builtins(machine(8, 2, 80 * GIB))))
    assert facts["cores"] == 8
    assert [card["id"] for card in facts["cards"]] == ["0", "1"]
    assert msgspec.convert(facts, Machine) == machine(8, 2, 80 * GIB)


def test_gpus_of_one_name_and_memory_are_of_one_kind() -> None:
    gpus = [
        Gpu(id="0", name="A100", memory=80 * GIB),
        Gpu(id="1", name="T4", memory=15 * GIB),
        Gpu(id="2", name="A100", memory=80 * GIB - 1),
        Gpu(id="3", name="A100", memory=40 * GIB),
    ]
    assert [[gpu.id for gpu in kind] for kind in kinds_of(gpus)] == [["0", "2"], ["1"], ["3"]]
    assert gpus_text(gpus) == "2 x A100 (80 GiB), 1 x T4 (15 GiB), 1 x A100 (40 GiB)"
    assert (kinds_of([]), gpus_text([])) == ([], "")


def test_a_gpu_is_known_by_its_unique_id_else_by_its_index() -> None:
    gpu = Gpu(name="T4", id="0", uuid="GPU-a")
    assert gpu.is_same(Gpu(name="T4", id="1", uuid="GPU-a"))
    assert not gpu.is_same(Gpu(name="T4", id="0", uuid="GPU-b"))
    assert gpu.is_same(Gpu(name="T4", id="0"))


# Strength


def test_strength_is_gpu_memory_then_cores_then_the_expected_order_then_the_name() -> None:
    classes = [
        ComputeClass(name="b", slots=1, cores=4),
        ComputeClass(name="a", slots=1, cores=4),
        ComputeClass(name="cpu", slots=1, cores=4),
        ComputeClass(name="many cores", slots=1, cores=64),
        ComputeClass(name="small gpu", slots=1, cores=4, gpu_memory=8 * GIB),
        ComputeClass(name="large gpu", slots=1, cores=2, gpu_memory=80 * GIB),
        ComputeClass(name="small gpu, many cores", slots=1, cores=32, gpu_memory=8 * GIB),
    ]
    expected = ["large gpu", "small gpu, many cores", "small gpu", "many cores", "cpu", "a", "b"]
    for order in (classes, classes[::-1]):
        assert [c.name for c in by_strength(order)] == expected


def test_classes_that_play_on_one_machine_keep_the_studys_order() -> None:
    classes = [ComputeClass(name=name, slots=1, cores=4) for name in sorted(DEFAULT_CLASSES)]
    assert tuple(c.name for c in by_strength(classes)) == DEFAULT_CLASSES
    assert [c.name for c in by_strength(classes, ("cpu", "gpu_small", "gpu_large"))] == list(DEFAULT_CLASSES[::-1])


def test_a_class_of_which_nothing_else_is_known_has_unknown_memory() -> None:
    assert ComputeClass(name="c", slots=1).memory == 0


def test_a_study_alone_may_fill_every_slot() -> None:
    assert ComputeClass(name="c", slots=3).share == 3
    assert ComputeClass(name="c", slots=3, allowance=1.5).share == 1.5
    assert ComputeClass(name="c", slots=3, allowance=0.0).share == 0


def test_a_study_may_fill_its_share_rounded_up_unless_it_takes_turns() -> None:
    shared = ComputeClass(name="c", slots=3, allowance=1.5)
    assert shared.limit == 2
    assert [replace(shared, turn=turn).limit for turn in range(3)] == [1, 2, 3]


# Detection


class FakeNvml(ModuleType):
    """NVIDIA's library as far as it is asked, with GPUs of these memories; `broken` names the call that fails."""

    class NVMLError(Exception):
        pass

    def __init__(self, memories: list[int], broken: str = "", parts: Mapping[int, int] | None = None) -> None:
        """`parts` are the numbers of parts of the GPUs that are divided into parts of 10 GiB."""
        super().__init__("pynvml")
        self.memories = memories
        self.broken = broken
        self.parts = parts
        self.open = 0

    def _answer(self, call: str, answer: Any) -> Any:
        if call == self.broken:
            raise self.NVMLError(call)
        return answer

    def nvmlInit(self) -> None:  # noqa: N802 -- the library's name
        self._answer("init", None)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return int(self._answer("count", len(self.memories)))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return int(self._answer("handle", index))

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if self.parts is None:
            raise self.NVMLError("the GPU cannot be divided")
        return [int(handle in self.parts), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> tuple[int, int]:  # noqa: N802
        if self.parts is None or index >= self.parts[handle]:
            raise self.NVMLError("there are fewer parts")
        return handle, index

    def nvmlDeviceGetMemoryInfo(self, handle: int | tuple[int, int]) -> Any:  # noqa: N802
        class Info:
            total = self.memories[handle] if isinstance(handle, int) else 10 * GIB

        return self._answer("memory", Info)

    def nvmlDeviceGetUUID(self, handle: int | tuple[int, int]) -> str:  # noqa: N802
        uuid = f"GPU-{handle}a-{handle}" if isinstance(handle, int) else f"MIG-{handle[0]}-{handle[1]}"
        return str(self._answer("uuid", uuid))

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != "MIG-1":
            raise self.NVMLError(uuid)
        return 1

    def nvmlDeviceGetName(self, handle: int | tuple[int, int]) -> str:  # noqa: N802
        name = f"Fake {handle}" if isinstance(handle, int) else f"Fake {handle[0]} MIG 1g.10gb"
        return str(self._answer("name", name))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SHADHO_CORES", "SHADHO_SLOTS_PER_GPU"):
        monkeypatch.delenv(name, raising=False)


def with_gpus(monkeypatch: pytest.MonkeyPatch, memories: list[int], broken: str = "") -> tuple[Machine, FakeNvml]:
    fake = FakeNvml(memories, broken)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return detect(), fake


def test_the_machine_is_told_by_its_name_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = with_gpus(monkeypatch, [])
    assert found.host == socket.gethostname()
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.memory > 2**20
    assert found.pool
    assert int(found.processors, 16).bit_count() >= found.cores
    assert (found.cards, found.gpu_memory, found.compute_class) == ((), 0, "cpu")


def test_the_smallest_gpu_decides_on_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    found, fake = with_gpus(monkeypatch, [80 * GIB, 8 * GIB])
    assert (found.gpu_memory, found.compute_class) == (8 * GIB, "gpu_small")
    assert fake.open == 0, "the library is let go of"


@pytest.mark.parametrize(
    ("visible", "gpus", "gpu_memory"),
    [
        ("0", ("0",), 80 * GIB),
        ("2,0", ("2", "0"), 24 * GIB),
        (" 1 , 2 ", ("1", "2"), 8 * GIB),
        ("", (), 0),
        ("-1", (), 0),
        ("7", (), 0),
        ("0,0", ("0",), 80 * GIB),
        ("GPU-1a-1,GPU-0", ("1", "0"), 8 * GIB),
        ("GPU-", (), 0),
        ("GPU-7", (), 0),
        ("MIG-1,MIG-7", ("MIG-1",), 8 * GIB),
    ],
)
def test_only_the_gpus_left_to_this_process_count(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[str, ...], gpu_memory: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, _ = with_gpus(monkeypatch, [80 * GIB, 8 * GIB, 24 * GIB])
    assert (tuple(card.id for card in found.cards), found.gpu_memory) == (gpus, gpu_memory)


def test_each_gpu_has_its_own_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = with_gpus(monkeypatch, [80 * GIB, 8 * GIB])
    assert found.cards == (
        Gpu(id="0", name="Fake 0", memory=80 * GIB, uuid="GPU-0a-0"),
        Gpu(id="1", name="Fake 1", memory=8 * GIB, uuid="GPU-1a-1"),
    )


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ("0", "MIG-1-0", "MIG-1-1", "MIG-1-2")),
        ("1", ("MIG-1-0", "MIG-1-1", "MIG-1-2")),
        ("GPU-1a,0", ("MIG-1-0", "MIG-1-1", "MIG-1-2", "0")),
        ("2", ()),
    ],
)
def test_of_a_gpu_that_is_divided_the_parts_are_the_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: tuple[str, ...]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([8 * GIB, 80 * GIB, 80 * GIB], parts={1: 3, 2: 0}))
    found = detect()
    assert tuple(card.id for card in found.cards) == gpus
    for part in [each for each in found.cards if each.id != "0"]:
        assert (part.name, part.memory, part.uuid) == ("Fake 1 MIG 1g.10gb", 10 * GIB, part.id)
    if visible is None:
        slots = [found.slot_environment("gpu_small", [slot], 4)["CUDA_VISIBLE_DEVICES"] for slot in range(4)]
        assert slots == [*gpus], "CUDA uses one part a process"


def test_apples_gpu_is_a_device_of_torch_that_cuda_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    found, _ = with_gpus(monkeypatch, [], "init")
    assert [(gpu.id, gpu.device, gpu.name) for gpu in found.cards] == [("mps", "mps", "Apple GPU")]
    assert found.gpu_memory == found.memory * 3 // 4
    assert found.slots_for("gpu_small") == 1
    environment = found.slot_environment("gpu_small", [0], 1)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["SHADHO_DEVICE"]) == ("", "mps")
    assert found.slot_environment("cpu", [0], 1)["SHADHO_DEVICE"] == "cpu"


@pytest.mark.parametrize("broken", ["init", "count", "handle", "memory", "name", "uuid"])
def test_a_driver_that_fails_means_no_gpu_and_no_error(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    found, fake = with_gpus(monkeypatch, [80 * GIB], broken)
    assert (found.cards, found.gpu_memory, found.compute_class) == ((), 0, "cpu")
    assert fake.open == 0


@pytest.mark.parametrize(
    ("told", "cores"),
    [("1", 1), ("99999", None), pytest.param("9" * 5000, None, id="digits"), ("0", None), ("many", None), ("-1", None)],
)
def test_shadho_cores_bounds_the_cores(monkeypatch: pytest.MonkeyPatch, told: str, cores: int | None) -> None:
    unbounded = with_gpus(monkeypatch, [])[0].cores
    monkeypatch.setenv("SHADHO_CORES", told)
    found = detect()
    assert found.cores == (cores or unbounded)
    assert found.is_limited is (told in ("1", "99999"))


def test_each_class_that_was_outgrown_has_the_memory_that_was_too_small() -> None:
    assert shortages("gpu,cpu", "gpu,host") == [("gpu", Memory.GPU), ("cpu", Memory.HOST)]
    assert shortages(None, None) == shortages(None, "gpu") == []


def test_a_price_is_a_number_from_0_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHADHO_PRICE", raising=False)
    assert price() is None
    for told, expected in (("2.40", 2.4), ("0", 0.0)):
        monkeypatch.setenv("SHADHO_PRICE", told)
        assert price() == expected
    for told in ("nan", "-1", "inf", "2,40", "free"):
        monkeypatch.setenv("SHADHO_PRICE", told)
        with pytest.raises(UsageError, match="give the money that a slot costs an hour"):
            price()


@pytest.mark.parametrize("name", ["gpu_large", "größte", "a100-80.2+", "x" * 60])
def test_a_plain_name_is_one_of_a_class(name: str) -> None:
    check_class_name(name, "--class")


@pytest.mark.parametrize("name", ["a b", "a,b", "-a", ".", "a=1", "a@b", "a/b", "", "a\n", "\u200bcpu", "x" * 61, 7])
def test_another_name_is_refused_with_a_line_that_says_where_it_is_and_what_is_allowed(name: object) -> None:
    with pytest.raises(UsageError, match=r"^--class: .* is no name of a compute class; use up to 60 letters"):
        check_class_name(name, "--class")
