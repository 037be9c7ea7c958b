"""A trial's peak memory is that of the trial alone, of its GPU where it used one, and measuring it breaks nothing."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shadho_celery.core.trial import Memory
from shadho_celery.objective import call
from shadho_celery.objective.call import PeakMemory

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be set back")

MB = 10**6


class FakeCuda:
    """What torch.cuda tells of its allocator; `broken` is a GPU on which every call fails, as after a failed kernel."""

    def __init__(self, *, initialised: bool = True, held: int = 0, broken: bool = False, gpus: int = 1) -> None:
        self.initialised = initialised
        self.held, self.peaks = [held] * gpus, [held] * gpus
        self.broken = broken
        #: number of times that the allocator was emptied
        self.emptied = 0

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return len(self.held)

    def reset_peak_memory_stats(self, device: int) -> None:
        self._check()
        self.peaks[device] = self.held[device]

    def max_memory_allocated(self, device: int) -> int:
        self._check()
        return self.peaks[device]

    def memory_allocated(self, device: int) -> int:
        self._check()
        return self.held[device]

    def max_memory_reserved(self, device: int) -> int:
        return 2 * self.max_memory_allocated(device)

    def empty_cache(self) -> None:
        self._check()
        self.emptied += 1

    def use(self, size: int, device: int = 0) -> None:
        """Take `size` bytes and give them back."""
        self.initialised = True
        self.peaks[device] = max(self.peaks[device], self.held[device] + size)

    def _check(self) -> None:
        assert self.initialised, "asking would initialise CUDA"
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return with_torch(monkeypatch, FakeCuda())


def with_torch(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a system without Linux's /proc."""
    monkeypatch.setattr(call, "_RESET", tmp_path / "proc" / "clear_refs")


# The process's memory


@linux
def test_the_peak_is_seen_though_it_has_passed_and_the_next_measure_begins_anew() -> None:
    first = PeakMemory()
    before = first.read(Memory.HOST) or 0
    len(b"x" * 200 * MB)
    after = first.read(Memory.HOST) or 0
    assert before > 0
    assert after >= before + 150 * MB
    assert (PeakMemory().read(Memory.HOST) or 0) <= after - 150 * MB


@linux
def test_what_a_child_process_uses_is_not_counted() -> None:
    peak = PeakMemory()
    before = peak.read(Memory.HOST) or 0
    subprocess.run([sys.executable, "-c", f"b'x' * {200 * MB}"], check=True)
    assert (peak.read(Memory.HOST) or 0) <= before + 100 * MB


@linux
def test_processes_beside_it_are_counted_by_the_greatest_that_is_told(cuda: FakeCuda) -> None:
    peak = PeakMemory()
    before = peak.read(Memory.HOST) or 0
    for host, gpu in ((10**12, 10**9), (10**13, 10**8)):
        peak.add(host, gpu)
    assert 10**13 <= (peak.read(Memory.HOST) or 0) - before < 10**13 + 100 * MB
    cuda.use(10**9)
    assert peak.read(Memory.GPU) == 2 * 10**9


@pytest.mark.usefixtures("elsewhere")
def test_where_the_peak_cannot_be_set_back_it_is_unknown() -> None:
    assert PeakMemory().read(Memory.HOST) is None


# The GPU's memory


def test_on_a_gpu_the_peak_is_that_of_torchs_tensors_since_the_trial_began(cuda: FakeCuda) -> None:
    for size in (8 * 10**9, 10**9):
        peak = PeakMemory()
        cuda.use(size)
        assert peak.read(Memory.GPU) == size


def test_what_an_earlier_trial_left_on_the_gpu_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the way of this one."""
    cuda = with_torch(monkeypatch, FakeCuda(held=10**9))
    peak = PeakMemory()
    cuda.use(2 * 10**9)
    assert peak.read(Memory.GPU) == 3 * 10**9


def test_the_trial_that_first_uses_the_gpu_is_measured_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = with_torch(monkeypatch, FakeCuda(initialised=False))
    peak = PeakMemory()
    cuda.use(10**9)
    assert peak.read(Memory.GPU) == 10**9


def test_the_trial_that_first_loads_torch_is_measured_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    peak = PeakMemory()
    with_torch(monkeypatch, FakeCuda()).use(10**9)
    assert peak.read(Memory.GPU) == 10**9


def test_of_several_gpus_the_one_with_most_memory_counts_in_each_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = with_torch(monkeypatch, FakeCuda(gpus=3))
    for sizes in ((10**9, 8 * 10**9, 0), (10**9, 0, 2 * 10**9)):
        peak = PeakMemory()
        for device, size in enumerate(sizes):
            cuda.use(size, device)
        assert peak.read(Memory.GPU) == max(sizes)


class Held:
    """A tensor on the GPU, in a cycle of references."""

    def __init__(self, cuda: FakeCuda, size: int) -> None:
        self.cuda, self.size, self.itself = cuda, size, self
        cuda.use(size)
        cuda.held[0] += size

    def __del__(self) -> None:
        self.cuda.held[0] -= self.size


def test_what_a_trial_left_on_the_gpu_in_cycles_is_freed_at_its_end(cuda: FakeCuda) -> None:
    for size in (8 * 10**9, 10**9):
        peak = PeakMemory()
        Held(cuda, size)
        assert peak.read(Memory.GPU) == size
        peak.release()
        assert cuda.held == [0]


def test_what_was_on_the_gpu_before_a_trial_costs_no_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = with_torch(monkeypatch, FakeCuda(held=10**9))
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("nothing was left"))
    peak = PeakMemory()
    cuda.use(10**9)
    peak.release()


@pytest.mark.parametrize(("slots", "emptied", "factor"), [("auto", 1, 2), ("4", 0, 1)])
def test_where_trials_share_gpus_the_allocators_memory_counts_and_is_given_back(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, slots: str, emptied: int, factor: int
) -> None:
    monkeypatch.setenv("SHADHO_SLOTS_PER_GPU", slots)
    peak = PeakMemory()
    cuda.use(10**9)
    assert peak.read(Memory.GPU) == factor * 10**9
    peak.release()
    assert cuda.emptied == emptied


@linux
def test_the_memory_of_the_gpu_and_of_the_process_are_two(cuda: FakeCuda) -> None:
    peak = PeakMemory()
    assert peak.read(Memory.GPU) is None, "it took nothing there"
    cuda.use(10**15)
    assert peak.read(Memory.GPU) == 10**15
    assert MB < (peak.read(Memory.HOST) or 0) < 10**14


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "torch",
    [None, SimpleNamespace(), SimpleNamespace(cuda=FakeCuda(broken=True)), object()],
    ids=["none", "empty", "broken", "no module"],
)
def test_whatever_has_become_of_torch_measuring_raises_nothing(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    peak = PeakMemory()
    assert peak.read(Memory.GPU) is None
    peak.release()


def test_torch_is_not_loaded_and_cuda_not_begun_for_the_measure() -> None:
    code = (
        "import sys; from shadho_celery.objective.call import PeakMemory; "
        "from shadho_celery.core.trial import Memory; "
        "PeakMemory().read(Memory.GPU); print('torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "False"
