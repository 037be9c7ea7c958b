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
    "recursion limit": ("sys.setrecursionlimit(3000)", "sys.getrecursionlimit()"),
    "descriptor 0": ("os.close(0)", "identity(0)"),
    "descriptor 1": ("os.close(1)", "identity(1)"),
    "descriptor 2": ("os.dup2(0, 2)", "identity(2)"),
    "sys.stdin": ("sys.stdin = None", "sys.stdin"),
    "sys.stdout": ("sys.stdout = io.StringIO()", "sys.stdout"),
    "sys.stderr": ("sys.stderr = None", "sys.stderr"),
    "settings of sys.stdout": ("sys.stdout.reconfigure(errors='strict')", "sys.stdout.errors"),
    "sys.excepthook": ("sys.excepthook = print", "sys.excepthook"),
    "sys.unraisablehook": ("sys.unraisablehook = print", "sys.unraisablehook"),
    "sys.displayhook": ("sys.displayhook = print", "sys.displayhook"),
    "sys.breakpointhook": ("sys.breakpointhook = print", "sys.breakpointhook"),
    "sys.dont_write_bytecode": ("sys.dont_write_bytecode ^= True", "sys.dont_write_bytecode"),
    "sys.tracebacklimit": ("sys.tracebacklimit = 0", "getattr(sys, 'tracebacklimit', None)"),
    "threading.excepthook": ("threading.excepthook = print", "threading.excepthook"),
    "logging.raiseExceptions": ("logging.raiseExceptions = False", "logging.raiseExceptions"),
    "logging.lastResort": ("logging.lastResort = None", "logging.lastResort"),
    "warnings.formatwarning": ("warnings.formatwarning = print", "warnings.formatwarning"),
    "warnings.showwarning": ("warnings.showwarning = print", "warnings.showwarning"),
    "tempfile.tempdir": ("os.environ['TMPDIR'] = '/'; tempfile.gettempdir()", "tempfile.tempdir"),
    "sys.path": ("sys.path.insert(0, '/')", "sys.path"),
    "sys.path, another list": ("sys.path = ['/']", "sys.path"),
    "sys.meta_path": ("sys.meta_path.clear()", "sys.meta_path"),
    "sys.path_hooks": ("sys.path_hooks.clear()", "sys.path_hooks"),
    "sys.argv": ("sys.argv[:] = ['other']", "sys.argv"),
    "gc.callbacks": ("gc.callbacks.append(lambda *_: None)", "gc.callbacks"),
    "logging._logRecordFactory": ("logging.setLogRecordFactory(dict)", "logging.getLogRecordFactory()"),
    "logging._loggerClass": (
        "logging.setLoggerClass(type('Mine', (logging.Logger,), {}))",
        "logging.getLoggerClass()",
    ),
    "datetime.date": ("datetime.date = None", "datetime.date"),
    "datetime.datetime": ("datetime.datetime = None", "datetime.datetime"),
    "socket.socket": ("socket.socket = type('Mine', (socket.socket,), {})", "socket.socket"),
    "socket.create_connection": ("socket.create_connection = None", "socket.create_connection"),
    "socket.getaddrinfo": ("socket.getaddrinfo = None", "socket.getaddrinfo"),
    "names of os": ("os.getpid = lambda: 1", "os.getpid"),
    "names of posixpath": ("os.path.exists = lambda _: False", "os.path.exists"),
    "names of random": ("random.random = lambda: 0", "random.random"),
    "names of time": ("time.time = lambda: 0; time.sleep = print", "time.time"),
    "tracemalloc": ("tracemalloc.start()", "tracemalloc.is_tracing()"),
    "flags of dlopen": ("sys.setdlopenflags(os.RTLD_GLOBAL | os.RTLD_NOW)", "sys.getdlopenflags()"),
    "ssl._create_default_https_context": (
        "ssl._create_default_https_context = ssl._create_unverified_context",
        "ssl._create_default_https_context",
    ),
    **{f"json.{name}": (f"json.{name} = None", f"json.{name}") for name in ("dump", "dumps", "load", "loads")},
    **{
        f"subprocess.{name}": (f"subprocess.{name} = None", f"subprocess.{name}")
        for name in ("Popen", "call", "check_call", "check_output", "run")
    },
    "error handlers of codecs": ("codecs.register_error('strict', print)", "codecs.lookup_error('strict')"),
    "names of builtins": ("builtins.print = None; builtins.new = 1; del builtins.abs", "dict(vars(builtins))"),
    "loggers": ("logging.getLogger('known').addHandler(logging.NullHandler())", "logging.getLogger('known').handlers"),
    "loggers, a new one": ("logging.getLogger('new').setLevel(1)", "logging.getLogger('new').level"),
    "loggers, of the root": ("logging.basicConfig(level=1)", "(logging.root.level, logging.root.handlers)"),
    "loggers, switched off": ("logging.getLogger('known').disabled = True", "logging.getLogger('known').disabled"),
    "logging.disable": ("logging.disable(50)", "logging.root.manager.disable"),
    "logging._warnings_showwarning": ("logging.captureWarnings(True)", "warnings.showwarning is SHOW"),
    "sys.modules": ("sys.modules['json'] = types.ModuleType('json')", "sys.modules['json']"),
    "sys.modules, removed": ("del sys.modules['json']", "'json' in sys.modules"),
    "sys.modules, blocked": ("sys.modules['wave'] = None", "sys.modules.get('wave', 1)"),
    "gc": ("gc.disable(); gc.set_threshold(7); gc.set_debug(gc.DEBUG_SAVEALL)", "gc.isenabled(), gc.get_threshold()"),
    "socket time-out": ("socket.setdefaulttimeout(1)", "socket.getdefaulttimeout()"),
    "locale": ("locale.setlocale(locale.LC_ALL, 'C')", "locale.setlocale(locale.LC_CTYPE)"),
    "trace function": ("sys.settrace(lambda *_: None); threading.settrace(print)", "sys.gettrace()"),
    "profile function": ("sys.setprofile(lambda *_: None)", "sys.getprofile()"),
    "switch interval": ("sys.setswitchinterval(1)", "sys.getswitchinterval()"),
    "stack size of threads": ("threading.stack_size(2**20)", "threading.stack_size()"),
    "digits of integers": (
        "getattr(sys, 'set_int_max_str_digits', id)(0)",
        "getattr(sys, 'get_int_max_str_digits', dict)()",
    ),
    "faulthandler": ("faulthandler.disable()", "faulthandler.is_enabled()"),
    "working directory": ("os.chdir('/')", "os.getcwd()"),
    "environment": ("os.environ['NEW'] = '1'", "dict(os.environ)"),
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
    "processor affinity": ("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", "os.sched_getaffinity(0)"),
    "scheduling policy": ("os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))", "os.sched_getscheduler(0)"),
    "decimal context": ("decimal.getcontext().prec = 5; decimal.Decimal(1) / 3", "repr(decimal.getcontext())"),
    "start method of multiprocessing": (
        "multiprocessing.set_start_method('spawn')",
        "multiprocessing.get_start_method(allow_none=True)",
    ),
    "asyncio.events._event_loop_policy": ("asyncio.run(asyncio.sleep(0))", "asyncio.events._event_loop_policy"),
    "numpy.seterr": ("numpy.seterr(all='raise')", "numpy.geterr()"),
    "numpy.seterrcall": ("numpy.seterrcall(print)", "numpy.geterrcall()"),
    "numpy.set_printoptions": ("numpy.set_printoptions(precision=2)", "numpy.get_printoptions()"),
    "numpy.random.set_bit_generator": (
        "numpy.random.set_bit_generator(numpy.random.PCG64(1))",
        "numpy.random.get_bit_generator()",
    ),
    "threads of numpy's libraries": ("threadpoolctl.threadpool_limits(1)", "THREADS()"),
}

TORCH = {
    "default dtype of torch": ("torch.set_default_dtype(torch.float64)", "torch.zeros(1).dtype"),
    "default device of torch": ("torch.set_default_device('meta')", "torch.zeros(1).device"),
    "grad mode of torch": ("torch.set_grad_enabled(False)", "torch.is_grad_enabled()"),
    "process group of torch": (
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
        "torch.distributed.is_initialized()",
    ),
    "threads of torch": ("torch.set_num_threads(1)", "torch.get_num_threads()"),
    "deterministic mode of torch": (
        "torch.use_deterministic_algorithms(True)",
        "torch.are_deterministic_algorithms_enabled()",
    ),
    "matmul precision of torch": (
        "torch.set_float32_matmul_precision('medium')",
        "torch.get_float32_matmul_precision()",
    ),
    "float32 precision of torch": (
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'; torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "[torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]",
    ),
    "float32 precision of torch, of all libraries": (
        "torch.backends.fp32_precision = 'tf32'",
        "[torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision]",
    ),
    "anomaly mode of torch": ("torch.autograd.set_detect_anomaly(True)", "torch.is_anomaly_enabled()"),
    "denormal numbers of torch": ("torch.set_flush_denormal(True)", "sys.float_info.min / 2 > 0"),
    "sharing strategy of torch": (
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        "torch.multiprocessing.get_sharing_strategy()",
    ),
    "autocast of torch (cpu)": ("torch.set_autocast_enabled('cpu', True)", "torch.is_autocast_enabled('cpu')"),
    "torch.backends.cudnn.benchmark": ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark"),
    "torch.backends.cudnn.deterministic": (
        "torch.backends.cudnn.deterministic = True",
        "torch.backends.cudnn.deterministic",
    ),
    "print options of torch": ("torch.set_printoptions(precision=1)", "str(torch.ones(1) / 3)"),
    "sklearn.set_config": ("sklearn.set_config(assume_finite=True)", "sklearn.get_config()"),
    "inter-op threads of torch": ("torch.set_num_interop_threads(7)", "torch.get_num_interop_threads()"),
}

CODE = """
import asyncio, builtins, codecs, datetime, decimal, faulthandler, gc, io, json, locale, logging, multiprocessing, os
import random, resource, signal, socket, ssl, subprocess, sys, tempfile, threading, time, tracemalloc, types, warnings
from pathlib import Path
from shadho_celery.runner.process_state import ProcessState, identity

def THREADS():
    return [each["num_threads"] for each in threadpoolctl.threadpool_info()]

def UMASK():
    path = Path("made") / str(time.time_ns())
    path.parent.mkdir(exist_ok=True, mode=0o777)
    path.touch()
    return path.stat().st_mode

Path("made").mkdir()
out, SHOW = os.fdopen(os.dup(1), "w"), warnings.showwarning
os.environ.pop("TZ", None)
faulthandler.enable()
locale.setlocale(locale.LC_ALL, "C.UTF-8")
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
    seen, parts = found(tmp_path, CASES, ["numpy", "threadpoolctl"], [])
    assert seen == {name: [True, [], True] for name in CASES}
    tested = {name.partition(",")[0] for name in CASES}
    # Handlers and limits are alike; only root can raise its priority again; nobody their rights.
    others = {name for name in parts if name.partition(" ")[0] in {"handler", "resource"}}
    assert set(parts) - tested - others == {"niceness", "user and groups"}


@pytest.mark.slow
@linux
def test_settings_of_a_library_that_is_imported_in_a_trial_are_those_of_its_import(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    seen, _ = found(tmp_path, TORCH, [], ["torch", "sklearn"])
    # It can be set once a process.
    last = {"inter-op threads of torch": [True, ["inter-op threads of torch"], False]}
    assert seen == {name: [True, [], True] for name in TORCH} | last
