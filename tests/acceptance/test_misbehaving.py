"""Objectives that do what they should not: each trial is judged for what it did itself, and for nothing else."""

from __future__ import annotations

import json

import pytest
from acceptance.commands import Desk

pytestmark = pytest.mark.timeout(180)

#: Trial 2n does deed number n, and trial 2n + 1 looks whether it notices anything of it.
STUDY = """
import ctypes, math, os, random, resource, signal, subprocess, sys, tempfile, threading, time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"classes": ["cpu"], "sampler": "random"}
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]

class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__

class OddOutput:
    def write(self, text):
        raise RuntimeError("no output")
    flush = write

def raises():
    raise ArithmeticError("on purpose")

def raises_unprintable():
    raise UnprintableError

def raises_unpicklable():
    error = ArithmeticError("with a lock")
    error.lock = threading.Lock()
    raise error

def interrupts():
    raise KeyboardInterrupt

def exits():
    sys.exit("told to go")

def exits_at_once():
    os._exit(9)

def segfaults():
    ctypes.string_at(0)

def kills_its_parent():
    subprocess.Popen(SLEEP, start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(300)

def kills_its_group():
    os.killpg(0, signal.SIGKILL)

def runs_out_of_memory():
    raise MemoryError

def closes_everything():
    os.closerange(0, 10_000)
    return 0.0

def writes_garbage():
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, b"garbage\\n")
        except OSError:
            pass
    return 0.0

def prints_much():
    for _ in range(100):
        print("x" * 100_000)
    raise ArithmeticError("after ten megabytes")

def returns_nan():
    return {"loss": math.nan}

def returns_nothing():
    pass

def returns_what_cannot_be_kept():
    return {"loss": 0.5, "model": object(), "huge": "x" * 100_000_000, "kept": 1}

def closes_standard_files():
    os.closerange(0, 3)
    return 0.0

def replaces_stdout():
    sys.stdout = OddOutput()
    return 0.0

def changes_everything():
    os.environ.clear()
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(1)
    random.seed(0)
    sys.setrecursionlimit(60)
    return 0.0

def removes_its_folder():
    os.chdir(folder := tempfile.mkdtemp())
    os.rmdir(folder)
    return 0.0

def leaves_threads():
    threading.Thread(target=time.sleep, args=(300,)).start()
    return 0.0

def leaves_children():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(SLEEP, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(300)
        os._exit(0)
    return 0.0

def returns_twice():
    os.fork()
    return 0.0

DEEDS = %(deeds)s

def look():
    print("it can print", flush=True)
    return {
        "loss": 1.0, "folder": os.getcwd(), "home": os.environ.get("PATH"), "recursion": sys.getrecursionlimit(),
        "terminated": str(signal.getsignal(signal.SIGTERM)), "threads": threading.active_count(),
        "files": [os.path.exists(f"/proc/self/fd/{number}") for number in range(3)],
    }

def objective(params, context):
    number, is_looking = divmod(context.trial, 2)
    return look() if is_looking else globals()[DEEDS[number]]()
"""

#: what a trial that did this must say; "" where it is COMPLETE
DEEDS = {
    "raises": "ArithmeticError: on purpose",
    "raises_unprintable": "UnprintableError",
    "raises_unpicklable": "ArithmeticError: with a lock",
    "interrupts": "KeyboardInterrupt",
    "exits": "SystemExit: told to go",
    "exits_at_once": "exit code 9",
    "segfaults": "in segfaults",
    "kills_its_parent": "SIGKILL",
    "kills_its_group": "SIGKILL",
    "runs_out_of_memory": "MemoryError",
    "closes_everything": "closed the pipe",
    "writes_garbage": "not a record",
    "prints_much": "after ten megabytes",
    "returns_nan": "'loss' is nan",
    "returns_nothing": "return value is None",
    "returns_what_cannot_be_kept": "",
    "closes_standard_files": "",
    "replaces_stdout": "",
    "changes_everything": "",
    "removes_its_folder": "",
    "leaves_threads": "",
    "leaves_children": "",
    "returns_twice": "",
}


def test_each_trial_is_judged_for_what_it_did_and_the_next_does_not_notice(desk: Desk) -> None:
    desk.write("misdeeds.py", STUDY % {"deeds": list(DEEDS)})
    command = desk.launch("misdeeds", "--trials", str(2 * len(DEEDS)), "--json", "--workers", "cpu=1").wait(120)
    assert command.code == 0, desk.said()
    trials = desk.trials()
    assert len(trials) == 2 * len(DEEDS)
    for (deed, says), trial in zip(DEEDS.items(), trials[::2], strict=True):
        if says:
            assert trial["state"] == "FAILED", deed
            assert says in trial["error"], deed
            assert len(trial["error"]) < 10_000, deed
        else:
            assert trial["state"] == "COMPLETE", (deed, trial["error"])
    looks = [json.loads(trial["metrics"]) for trial in trials[1::2]]
    assert all(trial["state"] == "COMPLETE" for trial in trials[1::2]), [trial["error"] for trial in trials[1::2]]
    assert all(look == looks[0] for look in looks), looks
    odd = trials[2 * list(DEEDS).index("returns_what_cannot_be_kept")]
    assert json.loads(odd["metrics"]) == {"kept": 1}
    assert "'model'" in odd["warning"]
    assert "'huge'" in odd["warning"]
    assert "Traceback" not in command.err
    desk.nothing_left()
