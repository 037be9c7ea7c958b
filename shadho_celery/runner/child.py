"""Code inside a slot's process. It runs the attempts that the worker's end (`runner`) sends, one after another."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from msgspec.structs import replace

from shadho_celery.core.checks import as_record, short
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.files import holds_files
from shadho_celery.core.hardware import DEVICE, THREAD_VARIABLES, thread_variables
from shadho_celery.core.trial import GangCall, Memory, Outcome, Params, TrialState, whole
from shadho_celery.errors import UsageError
from shadho_celery.objective import study_file
from shadho_celery.objective.call import Objective, PeakMemory, call, describe, joined, shared_memory, wants_context
from shadho_celery.objective.context import INTERRUPT, LocalContext, ReplicaDone, TrialStopped, TrialTimeout, reported
from shadho_celery.objective.sources import DiskWatch
from shadho_celery.runner import protocol
from shadho_celery.runner.process_state import Cleanup, identity, seed_generators
from shadho_celery.runner.process_tree import MARK

#: libraries whose number of threads threadpoolctl cannot set; it can for BLAS and OpenMP
_THREADED = ("torch", "numexpr")


class _Study(NamedTuple):
    """An imported study."""

    #: the objective, wrapped so that it can be interrupted
    objective: Objective
    takes_context: bool
    #: makes the objective's values from a trial's params
    values: Callable[[Params], Any]
    #: True if each trial gets a new process
    is_fresh: bool
    #: returns a file of the study that was edited after its import, or None; None if trials never read the files again
    edited: Callable[[], str | None] | None


class Child:
    """Runs the attempts that arrive over a pipe."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._pipe_identity = identity(pipe.fileno())
        self._pid = os.getpid()
        self._mark = os.environ.get(MARK, "")
        self._sending = threading.RLock()
        self._stop = threading.Event()
        #: number of the order whose trial must be told that its worker is preempted
        self._preempted = protocol.NO_ORDER
        self._timed_out = threading.Event()
        #: True while the objective runs; only then may the main thread be interrupted
        self._is_in_objective = False
        #: True while the main thread sends a record, which must not be interrupted; and True if an interrupt is due
        #: after that
        self._is_sending = self._is_interrupted = False
        #: True if an import was interrupted: a partly imported module would make the next trial fail
        self._is_torn = False
        #: orders that have not started; and the number of the running order
        self._orders: deque[protocol.RunAttempt] = deque()
        self._current = protocol.NO_ORDER
        self._is_recalled = False
        #: number of threads of the numerical libraries: now, and from the next trial on
        self._threads = self._wanted_threads = os.environ.get(THREAD_VARIABLES[0], "")
        self._changed = threading.Condition()
        self._studies: dict[str, _Study] = {}
        self._cleanup: Cleanup | None = None
        #: version of each module's imported code, or the reason why it could not be imported
        self._codes: dict[str, CodeVersion] = {}
        #: bytes of memory that this process shares with the prepared process
        self._shared = 0

    def serve(self, modules: Sequence[str]) -> None:
        """Import `modules`, then run attempts until the pipe is closed."""
        os.environ[study_file.WITHIN] = study_file.IN_A_TRIAL
        faulthandler.enable()
        _set_up_output()
        signal.signal(INTERRUPT, self._interrupt)
        threading.Thread(target=self._listen, daemon=True).start()
        for name in modules:
            # A module that cannot be imported makes only its own trials fail.
            with suppress(BaseException):
                self._study(name)
        self._cleanup = Cleanup()
        self._shared = shared_memory()
        self._send(protocol.Ready(codes=self._codes))
        goes_on = True
        while goes_on:
            with self._changed:
                if not self._orders:
                    self._divide_output(protocol.NO_ORDER)
                while not self._orders:
                    self._changed.wait()
                order = self._orders.popleft()
                # From now on, stop and interrupt records refer to this order.
                self._current = order.order
                self._stop.clear()
                self._timed_out.clear()
            goes_on = self._serve_one(order, self._cleanup)
        self._divide_output(protocol.NO_ORDER)
        # The worker starts another process, which runs the orders that were sent ahead.
        os._exit(0)

    def _serve_one(self, order: protocol.RunAttempt, cleanup: Cleanup) -> bool:
        """Run an attempt and send its end. Return whether this process can run another attempt.

        If the attempt needs another version of the code, this refuses it and returns False, so that a new process
        imports the current files.
        """
        if self._wanted_threads != self._threads:
            before, self._threads = self._threads, self._wanted_threads
            change_threads(before, self._threads)
            # From now on, the new number of threads is restored after each trial.
            cleanup.note()
        if not self._has(order):
            self._send(protocol.Refused(order=order.order, code=self._codes[order.payload.module]))
            return False
        self._divide_output(order.order)
        outcome = self._outcome(order, cleanup.spares[2])
        if os.getpid() != self._pid:
            # The trial has forked this process, and the objective has returned in it too.
            os._exit(0)
        try:
            left = cleanup.clear()
        except Exception as error:
            left = [f"changes that could not be undone: {type(error).__name__}: {short(error)}"]
        if left:
            outcome = replace(outcome, warning=joined(outcome.warning, f"it left behind {', '.join(left)}"))
        study = self._studies.get(order.payload.module)
        is_fresh = study is not None and study.is_fresh
        # A process that has run out of memory may still hold much of it.
        is_unfit = bool(left) or outcome.out_of_memory is not None or self._is_torn or is_fresh
        with self._sending:
            is_recalled = self._is_recalled
            self._send(protocol.Ended(order=order.order, outcome=outcome, is_unfit=is_unfit, is_recalled=is_recalled))
            self._current = protocol.NO_ORDER
        return not is_unfit

    def _divide_output(self, order: int) -> None:
        if self._cleanup is not None:
            self._cleanup.divide_output(protocol.boundary(self._mark, order))

    def _listen(self) -> None:
        """Act on the records from the pipe. End this process when either end of the pipe is closed."""
        with suppress(OSError, ValueError):
            for line in self._pipe.makefile("r", encoding="utf-8", newline="\n"):
                with self._changed:
                    self._obey(protocol.decode_to_child(line))
        os._exit(protocol.PIPE_LOST)

    def _obey(self, record: protocol.ToChild) -> None:
        if isinstance(record, protocol.RunAttempt):
            self._orders.append(record)
            self._is_recalled = False
            self._changed.notify()
        elif isinstance(record, protocol.Threads):
            self._wanted_threads = str(record.threads)
        elif record.what == "recall":
            # The order in the record may not have started yet, because a new process imports its modules first.
            self._orders = deque(each for each in self._orders if each.order <= record.order)
            self._is_recalled = True
        elif record.what == "preempt":
            # The order in the record may not have started yet.
            self._preempted = record.order
        elif record.order != self._current:
            # The trial ended before the record arrived.
            return
        elif record.what == "stop":
            self._stop.set()
        else:
            if record.what == "time up":
                self._timed_out.set()
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)

    def _interrupt(self, _: object = None, frame: FrameType | None = None) -> None:
        if not self._is_in_objective:
            return
        self._is_interrupted = self._is_sending
        if self._is_sending:
            return
        self._is_in_objective = False
        while frame is not None and not self._is_torn:
            self._is_torn = frame.f_code.co_filename.startswith("<frozen importlib")
            frame = frame.f_back
        if self._timed_out.is_set():
            raise TrialTimeout("the trial has reached its time limit (trial timeout)")
        raise TrialStopped("the trial was cancelled or pruned")

    def _context(self, order: protocol.RunAttempt) -> LocalContext:
        attempt, payload, seat = order.attempt, order.payload, order.payload.replica
        called: list[GangCall] = []

        def report(step: int, loss: float | Mapping[str, float]) -> None:
            # Of a gang, only the coordinator sends reports.
            if seat is None:
                self._send(protocol.Reported(order=order.order, step=step, **reported(loss)))

        def call_replicas(address: str, token: str, backups: int) -> None:
            if seat is not None:
                raise UsageError("replicas cannot be called from a replica; check context.replica first")
            if attempt.slots < 2 or payload.one_worker:
                raise UsageError(
                    'replicas cannot be called: the trial has one slot, or slots of one worker; see STUDY["slots"]'
                )
            if order.encrypted and find_spec("cryptography") is None:
                # The worker, which must encrypt the gang's token, has the same libraries as this process.
                raise UsageError(
                    "replicas cannot be called: the fleet has a signing key, so the gang is encrypted, which needs "
                    'cryptography; install it on all workers, in the checkout: pip install -e ".[torch]"'
                )
            call = {"address": address, "token": token, "backups": backups}
            form = "give host:port, a token, and backups >= 0"
            called.append(as_record(call, GangCall, "context.call_replicas", form))
            # The time limit is paused while the trial waits for replicas, so the traceback would be written too early.
            faulthandler.cancel_dump_traceback_later()
            self._send(protocol.Gang(order=order.order, call=called[-1]))

        def gang_assembled() -> None:
            # Without a call, the gang has no replicas on the fleet.
            if called:
                self._send(protocol.Gang(order=order.order, call=replace(called[-1], assembled=True)))

        return LocalContext(
            study=payload.name,
            trial=attempt.number,
            attempt=attempt.attempt,
            seed=attempt.seed,
            checkpoints=order.checkpoint_dir,
            device=os.environ.get(DEVICE, "cpu"),
            compute_class=order.compute_class,
            slot=order.slot,
            budget=whole(attempt.budget),
            on_report=report,
            objectives=payload.objectives,
            stopped=self._stop.is_set,
            preempted=lambda: self._preempted == order.order,
            timeout=payload.timeout,
            timed_out=self._timed_out.is_set,
            slots=attempt.slots,
            gpus=attempt.slots if payload.one_worker else 1,
            replica=seat,
            is_copy=attempt.not_on is not None,
            encrypted=order.encrypted,
            on_call_replicas=call_replicas,
            on_gang_assembled=gang_assembled,
        )

    def _outcome(self, order: protocol.RunAttempt, output: int) -> Outcome:
        """Run an attempt to its end. `output` is a copy of the descriptor of standard error."""
        attempt, payload, is_replica = order.attempt, order.payload, order.payload.replica is not None
        timeout = payload.timeout
        try:
            study = self._study(payload.module)
        except BaseException as error:
            return Outcome(state=TrialState.FAILED, error=describe(error), seconds=0.0)
        context = self._context(order)
        is_first = attempt.origin is None and attempt.attempt == 1
        continued = None if is_first else holds_files(Path(order.checkpoint_dir))
        peak = PeakMemory(self._shared)
        context.on_ranks = peak.add
        seed_generators(attempt.seed)
        if timeout is not None:
            # The traceback shows where a trial hangs, even if it hangs in C code, where Python cannot raise an
            # exception.
            faulthandler.dump_traceback_later(timeout + protocol.HARD_SECONDS - 1, file=output)
        try:
            # With `catch_warnings`, Python shows a warning once per trial instead of once per process. The copied
            # context resets context variables after the trial.
            with warnings.catch_warnings():
                outcome = copy_context().run(
                    call,
                    study.objective,
                    partial(study.values, attempt.params),
                    context,
                    takes_context=study.takes_context,
                    fatal=(ReplicaDone,) if is_replica else (),
                    # A replica's loss is not used: its coordinator returns the trial's loss.
                    objectives=None if is_replica else payload.objectives,
                )
        except ReplicaDone:
            outcome = Outcome(state=TrialState.CANCELLED, error="its gang does not need it any more", seconds=0.0)
        if timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        memory, gpu_memory = peak.read(Memory.HOST), peak.read(Memory.GPU)
        peak.release()
        facts = {"memory": memory, "gpu_memory": gpu_memory, "code": self._codes[payload.module].digest}
        return replace(outcome, continued=continued, **facts)

    def _interruptible(self, objective: Objective) -> Objective:
        """Return the objective, wrapped so that `_interrupt` can interrupt it."""
        limit = sys.getrecursionlimit()

        def run(*arguments: Any) -> Any:
            self._is_in_objective = True
            try:
                return objective(*arguments)
            finally:
                self._is_in_objective = False
                # Call this first: if the trial has set a low recursion limit, any other call would fail.
                sys.setrecursionlimit(limit)

        return run

    def _has(self, order: protocol.RunAttempt) -> bool:
        """Return whether this process has imported the code of an order."""
        if order.folder and order.folder != sys.path[0]:
            # A process uses one folder of shipped code. Search it before the working directory, which may contain an
            # old copy.
            sys.path.insert(0, order.folder)
        module, code = order.payload.module, order.payload.code
        if not code:
            return True
        if module not in self._studies:
            # The output of an import belongs to no trial.
            self._divide_output(protocol.NO_ORDER)
        elif (edited := self._studies[module].edited) and edited():
            del self._studies[module]
        with suppress(BaseException):
            self._study(module)
        return self._codes[module].digest == code

    def _study(self, module: str) -> _Study:
        """Return the study in `module`, which is imported at the first call. Raises the error of the import."""
        if module not in self._studies:
            # hyperopt takes long to import, so import it only for the first study.
            from shadho_celery.space.compile import compile_space

            try:
                file = study_file.load(module)
                space = compile_space({} if file.space is None else file.space)
                self._codes[module] = file.code.with_space(space.describe())
            except BaseException as error:
                self._codes[module] = study_file.failed_sources(module, error)
                raise
            finally:
                if self._cleanup is not None:
                    # State that a study file sets at its top level applies to all of its trials.
                    self._cleanup.note()
            objective, values = file.runnable(space)
            edited = partial(DiskWatch().edited, file.code) if file.reads_disk else None
            takes_context, is_fresh = wants_context(objective), bool(file.stated.get("fresh"))
            self._studies[module] = _Study(self._interruptible(objective), takes_context, values, is_fresh, edited)
        return self._studies[module]

    def _send(self, record: protocol.FromChild) -> None:
        with self._sending:
            if isinstance(record, protocol.Reported | protocol.Gang) and record.order != self._current:
                # A thread that still runs after its trial must not send records for the next trial.
                return
            if identity(self._pipe.fileno()) != self._pipe_identity:
                # The trial has closed the pipe, and the descriptor now belongs to a file of the trial.
                with suppress(OSError):
                    os.write(2, b"the trial closed the descriptor of the pipe between its process and the worker\n")
                os._exit(protocol.PIPE_LOST)
            is_main = threading.current_thread() is threading.main_thread()
            self._is_sending = is_main
            self._pipe.sendall(protocol.encode(record))
            self._is_sending = False
        if is_main and self._is_interrupted:
            self._interrupt()


def _set_up_output() -> None:
    """Configure output and logging. Call this before modules are imported, so that their settings override these."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=False)
    # Python shows no log message below WARNING unless a program configures logging. By default, studies show messages
    # from INFO on. A study's own logging.basicConfig replaces this.
    logging.getLogger().setLevel(logging.INFO)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.INFO)
        logging.lastResort.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


def change_threads(before: str, after: str) -> None:
    """Change the number of threads of the numerical libraries, including those that are imported later.

    `before` is the number so far. A library that has another number keeps it, because the study must have set it.
    OpenMP stores its number per thread, so call this in the thread that runs the trials.
    """
    if after == before:
        return
    os.environ.update({name: told for name, told in thread_variables(after).items() if os.environ.get(name) == before})
    for library in [sys.modules[name] for name in _THREADED if name in sys.modules]:
        # Another version of the library may lack these functions.
        with suppress(Exception):
            if str(library.get_num_threads()) == before:
                library.set_num_threads(int(after))
    if "numpy" in sys.modules:
        from threadpoolctl import ThreadpoolController

        for pool in ThreadpoolController().lib_controllers:
            if str(pool.num_threads) == before:
                pool.set_num_threads(int(after))


def main(arguments: Sequence[str]) -> None:
    """Run the attempts that arrive on a socket. The first argument is its descriptor; the others are modules."""
    if threads := os.environ.get(THREAD_VARIABLES[0]):
        # The libraries that a prepared process has imported are set to one thread.
        change_threads("1", threads)
    Child(socket.socket(fileno=int(arguments[0]))).serve(arguments[1:])
