"""A stand-in for NVIDIA's library, for worker processes: the cards are those of FAKE_GPUS, NAME:GIB,NAME:GIB."""

from __future__ import annotations

from pathlib import Path

#: module `pynvml`, as far as workers use it
_TEXT = """
import os
from types import SimpleNamespace

CARDS = [card.split(":") for card in os.environ["FAKE_GPUS"].split(",")]

class NVMLError(Exception):
    pass

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(CARDS)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMigMode(handle): return [0, 0]
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=int(CARDS[handle][1]) * 2**30, used=2**30)
def nvmlDeviceGetHandleByUUID(uuid): return int(uuid.removeprefix("GPU-"))
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=50)
def nvmlDeviceGetName(handle): return CARDS[handle][0]
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
"""


def fake_gpus(folder: Path, gpus: str) -> dict[str, str]:
    """Return the environment of a worker with these GPUs, whose working directory is `folder`."""
    (folder / "pynvml.py").write_text(_TEXT)
    return {"FAKE_GPUS": gpus}
