"""The number of threads changes in all libraries, but where the study has chosen another one."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shadho_celery.core.hardware import THREAD_VARIABLES
from shadho_celery.runner.child import change_threads


class Library:
    """A library with threads."""

    def __init__(self, threads: int) -> None:
        self.num_threads = threads

    def get_num_threads(self) -> int:
        return self.num_threads

    def set_num_threads(self, threads: int) -> None:
        self.num_threads = threads


def test_what_has_the_number_of_before_gets_the_new_one_and_a_studys_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    pools = [Library(4), Library(1)]
    torch, without = Library(4), SimpleNamespace()
    controller = SimpleNamespace(ThreadpoolController=lambda: SimpleNamespace(lib_controllers=pools))
    fakes: dict[str, Any] = {"torch": torch, "numexpr": without, "numpy": without, "threadpoolctl": controller}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    change_threads("4", "2")
    assert [os.environ[name] for name in THREAD_VARIABLES] == ["3", "2", "2", "2"]
    assert (torch.num_threads, [pool.num_threads for pool in pools]) == (2, [2, 1])
