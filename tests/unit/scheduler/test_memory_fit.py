"""A trial goes where it has memory and slots; out of a memory it goes to a class with more of that, if wide enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Memory, Outcome, Result, Retry, Trial, TrialState
from shadho_celery.placement.memory import MemoryFit
from shadho_celery.placement.model import CostModel
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SUBSPACES = split(compile_space({"x": hp.uniform("x", 0, 1)}))

GPU, HOST = Memory.GPU, Memory.HOST

SMALL = ComputeClass(name="small", slots=4, memory=8)
MIDDLING = ComputeClass(name="middling", slots=4, memory=16)
LARGE = ComputeClass(name="large", slots=2, memory=32)


@pytest.fixture
def memory_fit() -> MemoryFit:
    found = MemoryFit(CostModel(SUBSPACES), ())
    found.see([LARGE, SMALL])
    return found


def trial(number: int = 0, slots: int = 1, **facts: Any) -> Trial:
    [subspace] = SUBSPACES
    return Trial(number=number, subspace=subspace.name, params={"x": 0.5}, slots=slots, **facts)


def failed(of: Trial, compute_class: ComputeClass | None, out_of_memory: Memory | None) -> Result:
    outcome = Outcome(state=TrialState.FAILED, out_of_memory=out_of_memory)
    name = None if compute_class is None else compute_class.name
    return Result(number=of.number, attempt=1, outcome=outcome, compute_class=name, at=0.0)


def out_of_memory(memory_fit: MemoryFit, of: Trial, compute_class: ComputeClass, memory: Memory = HOST) -> Retry | None:
    """What is made of the news that a trial ran out of memory on a class."""
    return memory_fit.retry(failed(of, compute_class, memory), of)


def test_out_of_memory_loses_the_attempt_where_a_larger_class_has_the_slots(memory_fit: MemoryFit) -> None:
    retry = out_of_memory(memory_fit, trial(slots=2), SMALL)
    assert retry is not None
    assert (retry.outgrown, retry.memory, retry.reason) == ("small", HOST, "out of host memory on small")
    assert out_of_memory(memory_fit, trial(slots=2), LARGE) is None


def test_out_of_memory_ends_a_gang_that_no_larger_class_has_the_slots_for(memory_fit: MemoryFit) -> None:
    assert out_of_memory(memory_fit, trial(slots=3), SMALL) is None


def test_what_fails_for_another_reason_or_nobody_knows_where_is_not_tried_on_a_larger_class(
    memory_fit: MemoryFit,
) -> None:
    assert memory_fit.retry(failed(trial(), SMALL, None), trial()) is None
    assert memory_fit.retry(failed(trial(), None, HOST), trial()) is None


def test_what_is_likely_to_run_out_waits_for_a_larger_class_only_where_one_has_the_slots(memory_fit: MemoryFit) -> None:
    for number in range(5):
        out_of_memory(memory_fit, trial(number, slots=3), SMALL)
    assert [memory_fit.fits(trial(9, slots), SMALL) for slots in (1, 2, 3, 5)] == [False, False, True, False]
    assert [memory_fit.fits(trial(9, slots), LARGE) for slots in (1, 2, 3)] == [True, True, False]


def test_of_the_classes_wide_enough_the_one_with_most_memory_takes_what_needs_more() -> None:
    model = CostModel(SUBSPACES)
    ended = Outcome(state=TrialState.COMPLETE, seconds=1.0, memory=24)
    model.tell(*(trial(n, state=TrialState.COMPLETE, compute_class="large", outcome=ended) for n in range(30)))
    memory_fit = MemoryFit(model, ())
    memory_fit.see([LARGE, MIDDLING, SMALL])
    gang = trial(99, slots=3)
    assert [memory_fit.fits(gang, each) for each in (SMALL, MIDDLING, LARGE)] == [False, True, False]
    assert [memory_fit.fits(trial(99), each) for each in (SMALL, MIDDLING, LARGE)] == [False, False, True]


def test_what_has_outgrown_a_class_fits_no_smaller_one_while_a_larger_one_has_the_slots(memory_fit: MemoryFit) -> None:
    wide = replace(LARGE, slots=4)
    gang = trial(slots=3, outgrown="middling", outgrown_memory="host")
    memory_fit.see([wide, MIDDLING, SMALL])
    assert [memory_fit.fits(gang, each) for each in (SMALL, MIDDLING, wide)] == [False, False, True]
    memory_fit.see([wide, replace(MIDDLING, slots=2), SMALL])
    assert not memory_fit.fits(gang, SMALL), "whether or not that class could still take it"
    memory_fit.see([wide, SMALL])
    assert not memory_fit.fits(gang, SMALL)
    memory_fit.see([LARGE, SMALL])
    assert memory_fit.fits(gang, SMALL), "better to try than to wait for ever"


# Two memories

GIB = 2**30
#: a GPU node with little RAM, one with much GPU memory, and a node without GPUs that has most RAM
GPU_8 = ComputeClass(name="gpu_small", slots=2, memory=64 * GIB, gpu_memory=8 * GIB)
GPU_80 = ComputeClass(name="gpu_large", slots=2, memory=128 * GIB, gpu_memory=80 * GIB)
NODE = ComputeClass(name="cpu", slots=8, memory=256 * GIB)
FLEET = [GPU_80, GPU_8, NODE]


def fit_of(*classes: ComputeClass, model: CostModel | None = None) -> MemoryFit:
    found = MemoryFit(model or CostModel(SUBSPACES), ())
    found.see(classes)
    return found


def fitting(memory_fit: MemoryFit, of: Trial, classes: list[ComputeClass] = FLEET) -> list[str]:
    return [each.name for each in classes if memory_fit.fits(of, each)]


def after(of: Trial, *told: tuple[ComputeClass, Memory]) -> Trial:
    """A trial that has run out of memory on these classes."""
    return of.evolve(
        outgrown=",".join(each.name for each, _ in told), outgrown_memory=",".join(memory for _, memory in told)
    )


def test_out_of_gpu_memory_a_trial_goes_to_a_larger_gpu_and_not_to_the_node_with_most_memory() -> None:
    memory_fit = fit_of(*FLEET)
    retry = out_of_memory(memory_fit, trial(), GPU_8, GPU)
    assert retry is not None
    assert (retry.outgrown, retry.memory, retry.reason) == ("gpu_small", GPU, "out of GPU memory on gpu_small")
    assert fitting(memory_fit, after(trial(), (GPU_8, GPU))) == ["gpu_large"]
    assert not memory_fit.notices


def test_a_class_without_gpus_takes_what_no_gpu_could_hold_and_it_is_said() -> None:
    memory_fit = fit_of(*FLEET)
    retry = out_of_memory(memory_fit, after(trial(), (GPU_8, GPU)), GPU_80, GPU)
    assert retry is not None
    assert "no live class has a GPU that could hold them, so cpu, without one, is the last resort" in retry.reason
    assert [*memory_fit.notices] == [f"trials run {retry.reason}; a worker with a larger GPU would take them"]
    outgrown = after(trial(), (GPU_8, GPU), (GPU_80, GPU))
    assert fitting(memory_fit, outgrown) == ["cpu"]
    ended = Result(
        number=0, attempt=3, outcome=Outcome(state=TrialState.COMPLETE, loss=0.0), compute_class="cpu", at=0.0
    )
    said = memory_fit.warned(ended, outgrown).outcome.warning
    assert said == "ran on cpu, which has no GPU, after it ran out of GPU memory on gpu_small, gpu_large"
    assert memory_fit.warned(ended, trial()) == ended
    assert memory_fit.warned(replace_class(ended, "gpu_large"), outgrown).outcome.warning is None


def replace_class(result: Result, name: str) -> Result:
    return msgspec.structs.replace(result, compute_class=name)


def test_the_last_resort_ends_a_trial_that_runs_out_of_the_hosts_memory_there() -> None:
    outgrown = after(trial(), (GPU_80, GPU))
    assert out_of_memory(fit_of(*FLEET), outgrown, NODE, HOST) is None


def test_without_a_class_without_gpus_what_no_gpu_holds_fails() -> None:
    assert out_of_memory(fit_of(GPU_80, GPU_8), trial(), GPU_80, GPU) is None


def test_out_of_the_hosts_memory_a_trial_goes_where_there_is_more_ram() -> None:
    memory_fit = fit_of(*FLEET)
    assert out_of_memory(memory_fit, trial(), GPU_80, HOST) is not None
    assert fitting(memory_fit, after(trial(), (GPU_80, HOST))) == ["cpu"]
    assert fitting(fit_of(*FLEET), after(trial(), (GPU_8, HOST))) == ["gpu_large", "cpu"]
    assert out_of_memory(memory_fit, trial(1), NODE, HOST) is None, "no machine has more"
    assert not memory_fit.notices


def test_a_trial_that_ran_out_of_both_memories_goes_where_neither_is_too_small_and_a_last_resort_is_said() -> None:
    memory_fit = fit_of(*FLEET)
    assert out_of_memory(memory_fit, after(trial(), (GPU_8, GPU)), GPU_80, HOST) is not None
    [notice] = memory_fit.notices
    assert notice.startswith("trials run out of host memory on gpu_large: no live class has a GPU that could hold them")
    assert fitting(fit_of(*FLEET), after(trial(), (GPU_8, GPU), (GPU_80, HOST))) == ["cpu"]


def test_a_class_without_a_known_gpu_can_only_run_out_of_ram() -> None:
    memory_fit = fit_of(SMALL, LARGE)
    retry = out_of_memory(memory_fit, trial(), SMALL, GPU)
    assert retry is not None
    assert retry.memory is HOST
    assert memory_fit.fits(after(trial(), (SMALL, GPU)), LARGE)


def test_the_gpu_bound_is_learned_apart_from_the_hosts() -> None:
    """What is too large for a small GPU goes to the large one at once; the node may take it as it takes any trial."""
    memory_fit = fit_of(*FLEET)
    for number in range(5):
        out_of_memory(memory_fit, trial(number), GPU_8, GPU)
    assert fitting(memory_fit, trial(9)) == ["gpu_large", "cpu"]
    for number in range(5, 10):
        out_of_memory(memory_fit, trial(number), GPU_80, GPU)
    assert memory_fit.fits(trial(11), GPU_80), "a belief alone does not send it to the last resort"


def test_the_peak_of_each_memory_is_compared_with_that_of_the_class() -> None:
    model = CostModel(SUBSPACES)
    ended = Outcome(state=TrialState.COMPLETE, seconds=1.0, memory=100 * GIB, gpu_memory=20 * GIB)
    model.tell(*(trial(n, state=TrialState.COMPLETE, compute_class="gpu_large", outcome=ended) for n in range(30)))
    roomy = replace(GPU_8, memory=512 * GIB)
    assert fitting(fit_of(*FLEET, model=model), trial(99)) == ["gpu_large", "cpu"]
    assert fitting(fit_of(GPU_80, roomy, model=model), trial(99), [GPU_80, roomy]) == ["gpu_large"]
    lean = replace(GPU_8, name="lean", gpu_memory=40 * GIB)
    assert fitting(fit_of(GPU_80, lean, model=model), trial(99), [GPU_80, lean]) == ["gpu_large"], "too little RAM"


def test_some_class_takes_any_trial_however_unlike_its_memories_are() -> None:
    """One class has the larger GPU, the other more RAM, and the trial is believed too large for either."""
    roomy = replace(GPU_8, memory=512 * GIB)
    generator = np.random.default_rng(0)
    for _ in range(200):
        live = [each for each in (GPU_80, GPU_8, roomy, NODE) if generator.random() < 0.7] or [NODE]
        live = [replace(each, name=f"{each.name}{place}") for place, each in enumerate(live)]
        memory_fit = fit_of(*live)
        told = [(each, memory) for each in live for memory in Memory if generator.random() < 0.5]
        for number, (each, memory) in enumerate(told):
            out_of_memory(memory_fit, trial(number), each, memory)
        outgrown = after(trial(999), *(each for each in told if generator.random() < 0.5))
        assert fitting(memory_fit, outgrown, live)


def test_a_trial_that_waits_for_a_larger_gpu_goes_to_the_last_resort_once_that_class_is_gone() -> None:
    memory_fit = fit_of(*FLEET)
    outgrown = after(trial(), (GPU_8, GPU))
    memory_fit.see([GPU_8, NODE])
    assert fitting(memory_fit, outgrown) == ["cpu"]
    memory_fit.see([GPU_8])
    assert memory_fit.fits(outgrown, GPU_8), "better to try than to wait for ever"
