"""Codecs: payloads have the stated size, and decode to the vector in expectation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.cases import cases
from torch import nn

from shadho_celery.errors import UsageError
from shadho_celery.training.wire.frames import Header, Kind
from shadho_celery.training.wire.vectors import BLOCK, PART, Layout, Quantize, Shape, Vector

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


def test_two_bits_are_a_fifteenth_of_the_bytes() -> None:
    assert 15 < 4 * 100 * BLOCK / Quantize(2).encoded_bytes(100 * BLOCK) < 16


def test_without_a_codec_a_vector_is_exact_and_its_memory_is_sent() -> None:
    layout = Layout(Shape(nn.Linear(999, 1)), None, 1)
    vector, buffers = gradient(1000), np.zeros(0, dtype=np.float32)
    frame = layout.grad(Header(kind=Kind.GRAD), 0.5, 2.0, buffers, vector, seed=0)
    vector[0] = 42.0
    loss, weight, _, received = layout.read_grad(memoryview(b"".join(frame.parts)))
    assert (loss, weight) == (0.5, 2.0)
    assert (received == vector).all()


def test_eight_bits_are_within_a_percent_or_two() -> None:
    vector = gradient(10_000)
    assert np.linalg.norm(there_and_back(Quantize(8), vector) - vector) < 0.015 * np.linalg.norm(vector)


def test_zeros_stay_zeros() -> None:
    vector = gradient(3 * BLOCK)
    vector[::2] = 0.0
    vector[BLOCK : 2 * BLOCK] = 0.0
    assert (there_and_back(Quantize(2), vector)[vector == 0.0] == 0.0).all()


def test_a_whole_gradient_of_zeros_arrives() -> None:
    assert (there_and_back(Quantize(), np.zeros(100, dtype=np.float32)) == 0.0).all()


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
    for wrong in (b"", payload[:3], payload[:-1], payload + b"\0", payload[:-4]):
        with pytest.raises(ValueError, match="are not a"):
            codec.decode(wrong, out)
    with pytest.raises(ValueError, match="are not a"):
        codec.decode(payload, np.zeros(2 * BLOCK + 1, dtype=np.float32))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="are not a quantised"):
        Quantize().decode(garbage, np.zeros(1000, dtype=np.float32))
