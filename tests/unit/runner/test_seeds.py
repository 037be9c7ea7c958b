"""Each trial draws random numbers from its own seed, on its device too."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest
import torch
from services.cases import cases

from shadho_celery.core.hardware import DEVICE
from shadho_celery.runner.process_state import seed_generators


@cases(("device", "calls"), [("cuda", [call(7)]), ("cpu", [])])
def test_a_gpu_is_seeded_also_before_its_first_use(
    monkeypatch: pytest.MonkeyPatch, device: str, calls: list[object]
) -> None:
    """Otherwise the first trial of each process would draw from torch's own fixed seed there."""
    monkeypatch.setenv(DEVICE, device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded := Mock())
    seed_generators(7)
    drawn = torch.rand(3)
    seed_generators(7)
    assert torch.equal(torch.rand(3), drawn)
    assert seeded.mock_calls == 2 * calls
