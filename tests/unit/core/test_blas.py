"""The number of threads of linear algebra."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import sys
from threadpoolctl import threadpool_info
from shadho_celery.core.system import one_blas_thread

assert "scipy.linalg" not in sys.modules, "nothing is tested"
with one_blas_thread():
    import scipy.linalg
    threads = {pool["filepath"]: pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
assert {*threads.values()} == {1}, threads
"""


def test_linear_algebra_has_one_thread_although_scipy_loads_its_own_late() -> None:
    variables = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", CODE], check=True, env=variables)
