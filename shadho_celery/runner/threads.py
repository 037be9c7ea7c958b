"""Threads of the numerical libraries in a process. Their number changes when workers on its host start or end."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from shadho_celery.core.hardware import thread_variables

#: libraries with their own setting, besides the pools that threadpoolctl finds (BLAS, OpenMP)
_LIBRARIES = ("torch", "numexpr")


def change_threads(before: str, after: str) -> None:
    """Change the number of threads of the libraries that are imported, and of those imported later.

    A number other than `before` was set by the study and is kept. OpenMP stores its number per thread, so call this in
    the thread that runs the trials.
    """
    os.environ.update({name: told for name, told in thread_variables(after).items() if os.environ.get(name) == before})
    for library in [sys.modules[name] for name in _LIBRARIES if name in sys.modules]:
        # Another version of the library may lack one of them.
        with suppress(Exception):
            if str(library.get_num_threads()) == before:
                library.set_num_threads(int(after))
    if "threadpoolctl" in sys.modules:
        # `process_state` imports it with numpy.
        for pool in sys.modules["threadpoolctl"].ThreadpoolController().lib_controllers:
            if str(pool.num_threads) == before:
                pool.set_num_threads(int(after))
