"""A model becomes a vector, and its gradient a payload, and back; and a gradient a vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from services.cases import cases
from torch import nn

from shadho_celery.errors import UsageError
from shadho_celery.training.wire.frames import Header, Kind
from shadho_celery.training.wire.vectors import BLOCK, PART, Layout, Quantize, Shape, Tensors, Vector, is_finite


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 4))


def backward(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    model(torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def test_parameters_and_buffers_are_copied_unchanged() -> None:
    source, target = network(0), network(1)
    backward(source)
    one, other = Shape(source), Shape(target)
    assert one.digest == other.digest
    for here, there in ((one.parameters, other.parameters), (one.buffers, other.buffers)):
        vector = one.vector(here.size)
        here.read(vector)
        there.write(vector)
    pairs = zip(source.state_dict().items(), target.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for (_, a), b in pairs)
    assert target.state_dict()["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_floating_point_types_are_sent_as_float32(kind: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(kind)
    shape = Shape(model)
    vector = shape.vector()
    shape.parameters.read(vector)
    before = [p.clone() for p in model.parameters()]
    shape.parameters.write(vector)
    assert vector.dtype == np.float32
    for a, b in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_tied_parameters_are_sent_once_and_frozen_ones_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert Shape(model).parameters.size == 9 + 3 + 3


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.ReLU(), "no parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameters"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
    ],
    ids=["none", "frozen", "complex"],
)
def test_a_model_without_real_parameters_is_an_error(model: nn.Module, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Shape(model)


def test_a_gradient_vector_has_the_gradient_of_every_parameter_divided_by_the_loss_scale() -> None:
    model = network()
    shape = Shape(model)
    vector = shape.vector()
    for scale in (1.0, 4.0):
        backward(model)
        shape.parameters.read_gradients(vector, scale)
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert torch.equal(torch.from_numpy(vector), expected / scale)


def test_a_parameter_that_was_not_used_has_a_gradient_of_zero() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    shape = Shape(model)
    vector = shape.vector()
    for used in (0, 1, 0):
        model.zero_grad(set_to_none=True)
        model[used](torch.ones(1, 2)).sum().backward()
        shape.parameters.read_gradients(vector)
        assert vector.tolist() == ([1, 1, 0, 0], [0, 0, 1, 1])[used]


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([1.0, -2.0], True),
        ([3e38, 3e38, 3e38], True),
        ([np.inf, 0], False),
        ([np.inf, -np.inf], False),
        ([np.nan], False),
    ],
    ids=["plain", "great", "infinite", "both", "nan"],
)
def test_a_vector_is_finite_if_every_number_is(values: list[float], finite: bool) -> None:
    assert is_finite(np.array(values, dtype=np.float32)) is finite


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat memory apart from the vector, as on a GPU."""
    monkeypatch.setattr(Tensors, "flat", lambda self, host: torch.full_like(host, torch.nan))
    # Memory can be pinned only if there is a GPU.
    monkeypatch.setattr(Shape, "vector", lambda self, size=None: np.zeros(size or self.parameters.size, np.float32))


@pytest.mark.usefixtures("gpu")
def test_a_vector_is_copied_as_a_whole_to_flat_memory_and_from_there() -> None:
    source, target = Shape(network(0)), Shape(network(1))
    vector = source.vector()
    source.parameters.read(vector)
    target.parameters.write(vector)
    for a, b in zip(source.parameters.tensors, target.parameters.tensors, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("gpu")
def test_a_gradient_is_copied_over_flat_memory_and_zeros_where_there_is_none() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    shape = Shape(model)
    vector = shape.vector()
    for _ in range(2):
        model[0](torch.ones(1, 2)).sum().backward()
    shape.parameters.read_gradients(vector)
    assert vector.tolist() == [2, 2, 0, 0]


@cases(
    ("gradients", "finite"),
    [
        (([1.0], [2.0]), True),
        (([3e38, 3e38], [3e38]), True),
        (([np.inf], [-np.inf]), False),
        (([1.0], [np.nan]), False),
        ((None, [1.0]), True),
        ((None, None), True),
    ],
)
def test_gradients_are_finite_if_every_number_of_each_is(
    gradients: tuple[list[float] | None, ...], finite: bool
) -> None:
    model = nn.ParameterList(torch.zeros(1 if each is None else len(each)) for each in gradients)
    for parameter, each in zip(model, gradients, strict=True):
        parameter.grad = None if each is None else torch.tensor(each)
    assert Shape(model).has_finite_gradients() is finite


CODECS = {f"{n} bits": Quantize(n) for n in (2, 3, 5, 8)}
SIZES = [1, 7, 8, BLOCK, BLOCK + 1, 26_122, PART * BLOCK, PART * BLOCK + 9]


def gradient(size: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def there_and_back(codec: Quantize, vector: Vector, seed: int = 0) -> Vector:
    out = np.full_like(vector, 7.0)
    codec.decode(codec.encode(vector, np.random.default_rng(seed)), out)
    return out


@cases("codec", CODECS.values())
@cases("size", SIZES)
def test_each_number_is_off_by_at_most_one_level_of_its_block_and_the_payload_within_its_limit(
    codec: Quantize, size: int
) -> None:
    vector = gradient(size)
    payload = codec.encode(vector, np.random.default_rng(1))
    out = np.empty_like(vector)
    codec.decode(payload, out)
    assert len(payload) == codec.encoded_bytes(size)
    levels = 2 ** (codec.bits - 1) - 1
    for at in range(0, size, BLOCK):
        block = slice(at, at + BLOCK)
        assert np.abs(out[block] - vector[block]).max() <= 1.0001 * np.abs(vector[block]).max() / levels


@pytest.mark.slow
@pytest.mark.parametrize("bits", range(2, 9))
def test_quantising_is_unbiased(bits: int) -> None:
    vector, generator = gradient(2 * BLOCK), np.random.default_rng(3)
    codec, out = Quantize(bits), np.empty(2 * BLOCK, dtype=np.float32)
    rounds = 4000
    total = np.zeros(vector.size)
    for _ in range(rounds):
        codec.decode(codec.encode(vector, generator), out)
        total += out
    # A level is rounded up or down: its standard deviation is half a level at the most.
    level = np.abs(vector.reshape(-1, BLOCK)).max(axis=1).repeat(BLOCK) / (2 ** (bits - 1) - 1)
    errors = (total / rounds - vector) / (0.5 * level / np.sqrt(rounds))
    assert np.abs(errors).max() < 5.0
    assert abs(errors.mean()) < 0.2


@pytest.mark.parametrize(
    ("size", "bits", "expected"),
    [
        (8, 2, 4 + 2 * 32),
        (BLOCK, 3, 4 + 3 * 32),
        (26_122, 2, 103 * (4 + 2 * 32)),
        (PART * BLOCK + 1, 4, 257 * (4 + 4 * 32)),
    ],
)
def test_the_bytes_are_a_scale_for_each_block_and_its_bits(size: int, bits: int, expected: int) -> None:
    assert Quantize(bits).encoded_bytes(size) == expected
    assert len(Quantize(bits).encode(gradient(size), np.random.default_rng(0))) == expected


def test_without_a_codec_a_vector_is_exact_and_its_memory_is_sent() -> None:
    layout = Layout(Shape(nn.Linear(999, 1)), None, 1)
    vector, buffers = gradient(1000), np.zeros(0, dtype=np.float32)
    frame = layout.grad(Header(kind=Kind.GRAD), 0.5, 2.0, buffers, vector, seed=0)
    vector[0] = 42.0
    loss, weight, _, received = layout.read_grad(memoryview(b"".join(frame.parts)))
    assert (loss, weight) == (0.5, 2.0)
    assert (received == vector).all()


def test_zeros_stay_zeros() -> None:
    vector = gradient(3 * BLOCK)
    vector[::2] = 0.0
    vector[BLOCK : 2 * BLOCK] = 0.0
    assert (there_and_back(Quantize(2), vector)[vector == 0.0] == 0.0).all()


@cases("value", [np.nan, np.inf, -np.inf])
@cases("codec", CODECS.values())
def test_a_number_that_is_not_finite_stays_so(codec: Quantize, value: float) -> None:
    vector = gradient(3 * BLOCK)
    vector[BLOCK + 5] = value
    out = there_and_back(codec, vector)
    assert not np.isfinite(out[BLOCK + 5])
    assert np.isfinite(out[:BLOCK]).all()


@pytest.mark.parametrize("value", [1e-45, 1e-30, 3e38])
def test_tiny_and_huge_numbers_cause_no_warning_and_no_overflow(value: float) -> None:
    out = there_and_back(Quantize(4), np.full(BLOCK, value, dtype=np.float32))
    assert np.isfinite(out).all()
    assert np.abs(out).max() <= value * 1.01


def test_the_same_generator_gives_the_same_bytes() -> None:
    first, second = (bytes(Quantize(3).encode(gradient(500), np.random.default_rng(9))) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("bits", [1, 0, -2, 9, True, "dynamic", 2.5])
def test_other_numbers_of_bits_than_2_to_8_are_refused(bits: object) -> None:
    with pytest.raises(UsageError, match="2 to 8"):
        Quantize(bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_payload_of_another_size_is_refused(codec: Quantize) -> None:
    payload = bytes(codec.encode(gradient(300), np.random.default_rng(0)))
    out = np.zeros(300, dtype=np.float32)
    for wrong in (b"", b"garbage", payload[:3], payload[:-1], payload + b"\0", payload[:-4]):
        with pytest.raises(ValueError, match="are not a"):
            codec.decode(wrong, out)
    with pytest.raises(ValueError, match="are not a"):
        codec.decode(payload, np.zeros(2 * BLOCK + 1, dtype=np.float32))
