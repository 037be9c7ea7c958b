"""Prepared process, from which the processes of a worker's slots are forked.

It is started with ``python -m shadho_celery.runner.fork_server MODULE...``.

It imports the modules that all trials need. Then it forks a reaper (the parent of a slot's process) for each request
from the worker (`starting`). A fork takes hundredths of a second, whereas a new interpreter would repeat these imports.
The prepared process imports libraries but no code of studies, has one thread, and ends with its worker. Its environment
has no credentials, because other processes can read the environment of its forks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import logging
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct, convert

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.libraries import is_installed, is_library_folder, module_in
from shadho_celery.runner import process_tree, protocol, reaper
from shadho_celery.runner.process_tree import MARK, PR_SET_PDEATHSIG, UNMARKED, prctl

log = logging.getLogger(__name__)

#: modules that the fork server imports in advance, because trials need them. psutil finds the processes that a trial
#: has left behind; threadpoolctl sets the number of threads
_MODULES = (
    "numpy",
    "scipy",
    "hyperopt",
    "psutil",
    "threadpoolctl",
    "shadho_celery.runner.child",
    "shadho_celery.space.compile",
)

#: devices that a fork cannot use if its parent has opened them
_DEVICE = re.compile(r"/dev/(nvidia|kfd|dri/|accel)")


class Request(Struct, frozen=True):
    """A request to start a reaper. The descriptors of lifeline, pipe, output and status socket are sent with it."""

    #: variables to add to the environment
    environment: dict[str, str]
    #: module whose `main` runs in the reaper's child, and the arguments of `main` after the pipe's descriptor
    arguments: list[str]


def main() -> None:
    """Fork a reaper for each request that arrives on standard input, which is a socket, until its other end closes.

    Standard output is a file to which warnings about this process (complaints) are appended. The arguments are further
    modules to import.
    """
    worker = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    process_tree.ignore()
    (control, complaints), preload = _take_streams(), sys.argv[1:]
    mark = _address_of_mark()
    gc.disable()
    path = [*sys.path]
    # Libraries must not import files of a study that have the names of other libraries.
    sys.path[:] = [folder for folder in path if is_library_folder(folder)]
    for name in _MODULES:
        # If a module cannot be imported, trials fail with the reason.
        with suppress(Exception):
            importlib.import_module(name)
    if reason := _obstacle():
        _complain(complaints, f"the slots' processes cannot be forked: {reason}")
        os._exit(protocol.UNFIT)
    for name in preload:
        _preload(name, control, complaints)
    sys.path[:] = path
    # Exclude the imported objects from garbage collection, because it would write to their memory, and each fork would
    # then need its own copy of that memory.
    gc.collect()
    gc.freeze()
    # With SIG_IGN, the system collects the ended reapers. Set it after the imports, because a module may run a program
    # at its import and wait for that program.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if os.getppid() != worker:
        return
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, protocol.MAX_START, 4)
        if not message:
            return
        # If the fork fails, for example for lack of memory, the status socket closes without a message, which tells the
        # worker.
        with suppress(OSError):
            if os.fork() == 0:
                break
        for each in descriptors:
            os.close(each)
    control.close()
    os.close(complaints)
    _become_reaper(convert(json.loads(message), Request), *descriptors, mark=mark)


def _take_streams() -> tuple[socket.socket, int]:
    """Return standard input as a socket, and a descriptor of the file behind standard output. Replace these streams by
    /dev/null and standard error.
    """
    # The worker may have closed its standard streams. Occupy their descriptors, so that no other file gets them.
    while (empty := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    control, complaints = socket.socket(fileno=os.dup(0)), os.dup(1)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    return control, complaints


def _preload(name: str, control: socket.socket, complaints: int) -> None:
    """Import a module that a study names. If this process then cannot be forked, start again without it."""
    try:
        importlib.import_module(name)
        reason = _obstacle()
    except (Exception, SystemExit) as error:
        # Start again, because a failed import may leave a part of the module.
        reason = f"its import failed: {type(error).__name__}: {short(error)}"
    if reason:
        _complain(complaints, f"{name} is imported in each slot and not before (STUDY['preload']): {reason}")
        os.dup2(control.fileno(), 0)
        os.dup2(complaints, 1)
        arguments = [each for each in sys.argv[1:] if each != name]
        os.execv(sys.executable, [sys.executable, "-u", "-m", "shadho_celery.runner.fork_server", *arguments])


def _complain(complaints: int, text: str) -> None:
    """Log a complaint, and append it to the worker's file, from which the worker announces it."""
    log.warning("%s", text)
    with suppress(OSError):
        os.write(complaints, f"{one_line(text, protocol.MAX_COMPLAINT)}\n".encode())


def _obstacle() -> str:
    """Return why this process cannot be forked, or "" if it can."""
    if (count := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208 -- names alone
        return f"it has started {count - 1} threads"
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            if _DEVICE.match(target := os.readlink(f"/proc/self/fd/{number}")):  # noqa: PTH115
                return f"it has opened {target}"
    return ""


def _address_of_mark() -> int | None:
    """Return the address of the value of the variable MARK in this process's initial environment, or None."""
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    address = find(MARK.encode())
    return None if os.environ.get(MARK) != UNMARKED else address


def _become_reaper(request: Request, lifeline: int, pipe: int, output: int, status: int, *, mark: int | None) -> None:
    """Turn this fork into a reaper, as if it was started by `python -m shadho_celery.runner.reaper`."""
    pidfd = os.pidfd_open(os.getpid())
    _tell(status, b"started", [pidfd])
    os.setsid()
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        os.dup2(output, number)
        # Create a new stream, unbuffered as with -u: the existing one may have been opened for a file, and would then
        # seek to its end.
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for number in (output, pidfd):
        os.close(number)
    os.environ.update(request.environment)
    if mark is not None:
        # /proc shows only the initial environment, which `os.environ` does not change, so write the mark into its
        # memory.
        ctypes.memmove(mark, request.environment[MARK].encode(), len(UNMARKED))
    importlib.invalidate_caches()
    _forget_hidden()
    if "numpy.random" in sys.modules:
        # Python itself seeds `random` in each fork, but nothing seeds numpy's generator.
        sys.modules["numpy.random"].seed()
    gc.enable()
    module, *arguments = request.arguments
    own = os.getpid()
    try:
        code = reaper.run(lifeline, module, [str(pipe), *arguments], spare=[status])
    except Exception:
        if os.getpid() != own:
            # In the reaper's child, the error ends the process like any program.
            raise
        # The reaper could not start its child.
        traceback.print_exc()
        code = 1
    _tell(status, str(code).encode())
    # Do not run the exit functions of imported modules, which may delete temporary files of the prepared process.
    os._exit(0)


def _forget_hidden() -> None:
    """Remove imported libraries from sys.modules if a file of the study has the same name, so that the study imports
    its file.
    """
    for folder in sys.path:
        if is_library_folder(folder):
            continue
        with suppress(OSError):
            here = {name.removesuffix(".py") for name in os.listdir(folder or ".")}  # noqa: PTH208 -- names alone
            hidden = here & {name.partition(".")[0] for name in sys.modules} - {"shadho_celery", "__main__"}
            for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
                file = getattr(sys.modules[name], "__file__", None)
                if file and is_installed(file) and module_in(folder, name.partition(".")[0]):
                    del sys.modules[name]


def _tell(status: int, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message to the worker over the status socket. Do nothing if the worker has ended."""
    told = socket.socket(fileno=status)
    with suppress(OSError):
        socket.send_fds(told, [message], descriptors)
    # Keep the descriptor open, because other code uses its number.
    told.detach()


if __name__ == "__main__":
    main()
