"""The number of threads of linear algebra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit linear algebra to one thread, in a with statement or as a decorator.

    The scheduler's matrices are small, and its machine often runs trials. Several threads would wait for each other and
    take the cores from the trials.
    """
    with _libraries().limit(limits=1, user_api="blas"):
        yield


@cache
def _libraries() -> ThreadpoolController:
    # The controller knows only the libraries that are loaded now. numpy and scipy load one each, scipy a late one.
    import numpy as np  # noqa: F401
    import scipy.linalg  # noqa: F401

    return ThreadpoolController()
