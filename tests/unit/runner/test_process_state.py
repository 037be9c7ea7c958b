"""Each part of a process's state is read as it is, and written back: what one trial sets, no other one finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="parts that only Linux has")

#: by part, what changes it, and what a trial sees of it
CASES = {
    "standard descriptors": ("os.dup2(0, 2); os.close(0); os.close(1)", "[*map(identity, range(3))]"),
    "sys.stdin": ("sys.stdin = None", "sys.stdin"),
    "sys.stdout": ("sys.stdout = io.StringIO()", "sys.stdout"),
    "sys.stderr": ("del sys.stderr", "getattr(sys, 'stderr', None)"),
    "sys.path or sys.argv": ("sys.path.insert(0, '/'); sys.argv[:] = ['other']", "[*sys.path, *sys.argv]"),
    "sys.path or sys.argv, other lists": ("sys.path = ['/']; sys.argv = ['other']", "[*sys.path, *sys.argv]"),
    "warnings.showwarning": ("warnings.showwarning = print", "warnings.showwarning"),
    "logging._warnings_showwarning": ("logging.captureWarnings(True)", "warnings.showwarning is SHOW"),
    "loggers": ("logging.getLogger('known').addHandler(logging.NullHandler())", "logging.getLogger('known').handlers"),
    "loggers, a new one": ("logging.getLogger('new').setLevel(1)", "logging.getLogger('new').level"),
    "loggers, of the root": ("logging.basicConfig(level=1)", "(logging.root.level, logging.root.handlers)"),
    "loggers, switched off": ("logging.getLogger('known').disabled = True", "logging.getLogger('known').disabled"),
    "logging.disable": ("logging.disable(50)", "logging.root.manager.disable"),
    "working directory": ("os.chdir('/')", "os.getcwd()"),
    "environment": ("os.environ['NEW'] = '1'; del os.environ['PATH']", "dict(os.environ)"),
    "time zone": ("os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()", "time.localtime(0).tm_hour, time.tzname"),
    "time zone, of the C library alone": (
        "os.environ['TZ'] = 'Asia/Tokyo'; time.tzset(); del os.environ['TZ']",
        "time.localtime(0).tm_hour",
    ),
    "handler of SIGTERM": ("signal.signal(signal.SIGTERM, print)", "signal.getsignal(signal.SIGTERM)"),
    "signal mask": ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])", "signal.pthread_sigmask(0, ())"),
    "umask": ("os.umask(0o044)", "UMASK()"),
    "resource limit RLIMIT_NOFILE": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
        "resource.getrlimit(resource.RLIMIT_NOFILE)",
    ),
    "start method": ("multiprocessing.set_start_method('spawn')", "multiprocessing.get_start_method(allow_none=True)"),
    "numpy.seterr": ("numpy.seterr(all='raise')", "numpy.geterr()"),
}

TORCH = {
    "process group of torch": (
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
        "torch.distributed.is_initialized()",
    ),
    "default device of torch": ("torch.set_default_device('meta')", "torch.zeros(1).device"),
    "default_dtype of torch": ("torch.set_default_dtype(torch.float64)", "torch.zeros(1).dtype"),
    "num_threads of torch": ("torch.set_num_threads(1)", "torch.get_num_threads()"),
    "deterministic_debug_mode of torch": (
        "torch.use_deterministic_algorithms(True)",
        "torch.are_deterministic_algorithms_enabled()",
    ),
    "float32_matmul_precision of torch": (
        "torch.set_float32_matmul_precision('medium')",
        "torch.get_float32_matmul_precision()",
    ),
    "grad mode of torch": ("torch.set_grad_enabled(False)", "torch.is_grad_enabled()"),
    "anomaly mode of torch": ("torch.autograd.set_detect_anomaly(True)", "torch.is_anomaly_enabled()"),
    "torch.backends.cudnn.benchmark": ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark"),
    "torch.backends.cudnn.deterministic": (
        "torch.backends.cudnn.deterministic = True",
        "torch.backends.cudnn.deterministic",
    ),
    "torch.backends.cudnn.allow_tf32": ("torch.backends.cudnn.allow_tf32 = False", "torch.backends.cudnn.allow_tf32"),
    "torch.backends.cuda.matmul.fp32_precision": (
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'; torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "[torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]",
    ),
    "torch.backends.fp32_precision": (
        "torch.backends.fp32_precision = 'tf32'",
        "[torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision]",
    ),
}

CODE = """
import io, json, logging, multiprocessing, os, resource, signal, sys, time, warnings
from pathlib import Path
from shadho_celery.runner.process_state import ProcessState, identity

def UMASK():
    path = Path("made") / str(time.time_ns())
    path.parent.mkdir(exist_ok=True, mode=0o777)
    path.touch()
    return path.stat().st_mode

Path("made").mkdir()
out, SHOW = os.fdopen(os.dup(1), "w"), warnings.showwarning
os.environ.pop("TZ", None)
logging.getLogger("known")
first, libraries, cases = {first!r}, {libraries!r}, {cases!r}
for library in first:
    globals()[library] = __import__(library)
state, found = ProcessState([os.dup(number) for number in range(3)]), {{}}
for library in libraries:
    globals()[library] = __import__(library)
assert state.restore() == []
for name, (change, look) in cases.items():
    before = eval(look)
    if isinstance(before, (list, dict)):
        before = before.copy()
    exec(change)
    changed = eval(look)
    if isinstance(changed, (list, dict)):
        changed = changed.copy()
    left = state.restore()
    found[name] = [changed != before, left, eval(look) == before]
json.dump([found, [name for name, *_ in state._rules]], out)
"""


def found(
    tmp_path: Path, cases: dict[str, Any], first: list[str], libraries: list[str]
) -> tuple[dict[str, Any], list[str]]:
    code = CODE.format(cases=cases, first=first, libraries=libraries)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))  # type: ignore[return-value]


@linux
def test_each_part_is_seen_to_change_and_restored(tmp_path: Path) -> None:
    seen, parts = found(tmp_path, CASES, ["numpy"], [])
    assert seen == {name: [True, [], True] for name in CASES}
    # Handlers and limits are alike.
    others = {name for name in parts if name.partition(" ")[0] in {"handler", "resource"}}
    assert set(parts) - {name.partition(",")[0] for name in CASES} == others - {"resource limit RLIMIT_NOFILE"}


@linux
def test_what_cannot_be_restored_is_told(tmp_path: Path) -> None:
    cases = {"working directory": ("__import__('shutil').rmtree(os.getcwd())", "os.path.exists('made')")}
    seen, _ = found(tmp_path, cases, [], [])
    assert seen == {"working directory": [True, ["working directory"], False]}


@pytest.mark.slow
@linux
def test_settings_of_a_library_that_is_imported_in_a_trial_are_those_of_its_import(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    seen, _ = found(tmp_path, TORCH, [], ["torch"])
    assert seen == {name: [True, [], True] for name in TORCH}
