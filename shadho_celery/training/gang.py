"""Gang: several processes that train one model, started by an objective.

::

    with gang(context, replicas=8, backups="auto") as g:
        report = g.fit(model, optimizer, data, loss, steps=1000, batch=64)

A trial with several slots calls for its replicas through the queue of its class. The workers that get these messages
run the same objective with the same params and seed. There, `fit` acts as a replica, and leaves the objective by
raising `ReplicaDone`. A trial with one slot starts its replicas as processes on its own machine, which needs no broker.
"""

from __future__ import annotations

import hashlib
import logging
import math
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

from shadho_celery.core.addresses import LOOPBACK, close_socket, listen, own_address
from shadho_celery.core.checks import check_seconds, check_whole
from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.errors import UsageError
from shadho_celery.objective.context import Context, ReplicaDone
from shadho_celery.training.coordinator.centre import ModelCentre
from shadho_celery.training.coordinator.coordinator import Coordinator, QuorumPolicy
from shadho_celery.training.coordinator.listener import Listener, Terms
from shadho_celery.training.coordinator.run import Claim, Run
from shadho_celery.training.plan import Plan, taking
from shadho_celery.training.replica.batches import Computer
from shadho_celery.training.replica.processes import Processes
from shadho_celery.training.replica.replica import Delay, Workload, serve
from shadho_celery.training.replica.update import Update
from shadho_celery.training.report import Log, Report
from shadho_celery.training.strategies import MAX_REPLICAS, Async, Strategy, Sync
from shadho_celery.training.wire.vectors import MAX_PARAMETERS, Layout, Quantize, Vector

logger = logging.getLogger(__name__)


class Gang:
    """Several processes that train one model once, by default with the strategy `Sync`. Use it as a context manager.

    All vectors pass through one coordinator, which supports about 16 replicas and 50 million parameters well. For more,
    use DistributedDataParallel or torchft in the objective. `host` and `port` are the coordinator's address, by default
    this machine's address and a free port.

    The gang waits `start_seconds` for its first N replicas. The default is a minute, or an hour in a trial with several
    slots; there, the scheduler gives up an incomplete gang earlier. If fewer than N replicas are alive later, the gang
    waits `grace_seconds` for new replicas: by default 10, or 0 if the replicas are processes within one slot, which are
    not started again. After that, `on_few` decides: "shrink" continues with fewer replicas and a learning rate reduced
    in proportion, "wait" continues to wait, and "fail" raises ShadhoError. A replica that sends nothing for
    `deadline_seconds` counts as lost. `delay(place, draw)` returns the minimum seconds of a gradient, to simulate slow
    machines. Raises UsageError for arguments that are not valid.
    """

    def __init__(
        self,
        context: Context,
        replicas: int | None = None,
        backups: int | Literal["auto"] = 0,
        *,
        strategy: Strategy | None = None,
        codec: Quantize | None = None,
        host: str | None = None,
        port: int = 0,
        start_seconds: float | None = None,
        grace_seconds: float | None = None,
        on_few: Literal["shrink", "wait", "fail"] = "shrink",
        deadline_seconds: float = 30.0,
        delay: Delay | None = None,
    ) -> None:
        _check_arguments(strategy, codec, on_few)
        check_whole(0, 2**16 - 1, port=port)
        # `grace_seconds=0` is valid: the gang then does not wait for new replicas.
        check_seconds(
            start_seconds=start_seconds, grace_seconds=grace_seconds or None, deadline_seconds=deadline_seconds
        )
        self.context, self.strategy = context, _chosen_strategy(strategy, replicas, backups)
        replicas, backups = self.strategy.replicas, self.strategy.backups
        #: True if the gang calls for replicas through the queue of its class
        self._calls = context.slots > context.gpus
        if self._calls and replicas > context.slots:
            raise UsageError(
                f"the gang is for {replicas} replicas, but the trial has {context.slots} slots; "
                "set STUDY['slots'] to the number of replicas"
            )
        #: number b of backup replicas; "auto" starts with a third of N, rounded up
        self._backups = -(-replicas // 3) if backups == "auto" else backups
        self._places = replicas + self._backups
        # Replicas on other workers may take long to start. The scheduler gives up an incomplete gang earlier.
        start, grace = (3600.0, 10.0) if self._calls else (60.0, 0.0)
        self._policy = QuorumPolicy(
            start_seconds=start if start_seconds is None else start_seconds,
            grace_seconds=grace if grace_seconds is None else grace_seconds,
            on_few=on_few,
        )
        self._codec, self._delay, self._deadline = codec, delay, deadline_seconds
        self._host, self._port = host, port
        #: log of the training, which records which gradients made each step; `replay` uses it
        self.log = Log(
            replicas=replicas,
            places=self._places,
            can_replay=isinstance(self.strategy, Sync) and codec is None,
        )
        #: replica processes on this machine
        self.processes = Processes()
        #: address at which replicas reach the coordinator, as ``host:port``; None until it listens
        self.address: str | None = None
        #: report of the training, complete when the training has ended
        self.report = Report(backups=0, log=self.log)
        self._listener: Listener | None = None
        self._server: socket.socket | None = None
        self._used = False

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("the training has ended" if kind is None else f"the trial ended with {kind.__name__}")

    @taking(Plan)
    def fit(self, plan: Plan) -> Report:
        """Train a model. The arguments are the fields of `Plan`. Return the report.

        The loss is reported to the context every `report_every` steps and at the end. The training ends early if
        ``context.should_stop()`` is true, or at the goal. Checkpoints contain the state of model, optimizer, schedule,
        scaler, moving average and the objects in `keep`.

        Raises UsageError for arguments that are not valid, and if the loss is not finite at the first step; Diverged if
        gradients are not finite later; ShadhoError if too few replicas are left.
        """
        centre = self._begin(plan)
        if not self._averages:
            _check_local_steps(plan)
        if plan.warmup > plan.steps and self.context.replica is None:
            logger.warning(
                "the warm-up of %d steps is longer than the training of %d steps: the learning rates stay lower",
                plan.warmup,
                plan.steps,
            )
        for mean in self._train(plan, centre):
            if mean is None:
                centre.step()
            else:
                self.strategy.apply(centre, mean)
        return self.report

    @taking(Plan)
    def steps(self, plan: Plan) -> Iterator[int]:
        """Yield the number of each step once the mean gradient is in ``parameter.grad``. The caller then takes the
        step.

        Use this if `fit` cannot do what you need. The arguments are those of `fit`, except schedule, warmup, clip and
        scale_with_replicas. Failures, checkpoints and replay work as with `fit`. After the loop, the attribute `report`
        has the report. Raises the errors of `fit`.

        With `Sync`, while only k of the N replicas are present, `fit` multiplies the learning rates by k / N, because
        the batch is smaller. `steps` multiplies the gradient by k / N instead, because the caller sets the learning
        rates. `scale_with_replicas` is another factor, the constant N.
        """
        centre = self._begin(plan)
        if not self._averages:
            raise UsageError("a loop of your own needs a strategy that averages gradients: Sync or Async")
        for name in ("schedule", "warmup", "clip", "scale_with_replicas"):
            if getattr(plan, name):
                raise UsageError(f"{name} is for fit; a loop of your own takes the step, so it does this too")
        return self._by_hand(plan, centre)

    def _by_hand(self, plan: Plan, centre: ModelCentre) -> Iterator[int]:
        for mean in self._train(plan, centre):
            if mean is not None:
                centre.set_gradient(mean, scaled=True)
            yield centre.update.done

    @property
    def _averages(self) -> bool:
        """True if the replicas send gradients, and take no local steps."""
        return isinstance(self.strategy, Sync | Async)

    def _begin(self, plan: Plan) -> ModelCentre:
        if self._used:
            raise UsageError("a gang trains one model once; create another gang for the next model")
        self._used = True
        self.context.gangs += 1
        return ModelCentre(plan, self.strategy.replicas)

    def present(self) -> int:
        """Return the number of connected replicas, or 0 if this process trains alone."""
        return self._listener.present() if self._listener is not None else 0

    def close(self, reason: str) -> None:
        """Dismiss the replicas, and end the replica processes on this machine."""
        if self._server is not None:
            close_socket(self._server)
        if self._listener is not None:
            self._listener.close(reason)
        self.processes.close()
        if (peak := self.processes.gpu_peak) and hasattr(self.context, "on_ranks"):
            # The replicas' GPU memory is added to that of this process.
            self.context.on_ranks(0, peak)

    def _train(self, plan: Plan, centre: ModelCentre) -> Iterator[Vector | None]:
        """Train in this process's role: as a replica, as the coordinator, or as the only process. A replica then leaves
        the objective by raising ReplicaDone.

        Yields the mean of each step's vectors, which the caller applies, or None if it is already in
        ``parameter.grad``.
        """
        seed = self.context.seed if plan.seed is None else plan.seed
        # This raises errors in the data before any process is started.
        batches = plan.batches(self._places, seed)
        described = f"{centre.shape.digest}:{self.strategy!r}:{self._codec!r}:{batches.digest}:{self.context.gangs}"
        workload = Workload(
            computer=Computer(plan.model, plan.loss, batches, weight=plan.weight),
            update=Update(plan.optimizer) if self._averages else centre.update,
            strategy=self.strategy,
            codec=self._codec,
            # Append the number of examples as text, because it is what differs most often.
            digest=f"{hashlib.sha256(described.encode()).hexdigest()[:16]}-{batches.size}",
            # Connections within one machine need not be encrypted.
            encrypted=self.context.encrypted and self._calls,
            delay=self._delay,
        )
        if (seat := self.context.replica) is not None:
            # An earlier gang of the trial has ended. Skip it: the replica was called for a later gang, and gets the
            # parameters from its coordinator.
            if self.context.gangs >= seat.call:
                serve(seat, workload, self.context.should_stop)
                raise ReplicaDone
            return
        run = Run(
            plan,
            centre,
            self.context,
            self.log,
            digest=workload.digest,
            examples=batches.size if isinstance(self.strategy, Sync) else 0,
        )
        limits = ("replicas", self._places, MAX_REPLICAS), ("parameters", centre.size, MAX_PARAMETERS)
        for name, count, most in limits:
            if count > most:
                text = f"{count:,} {name} are more than the {most:,} that one coordinator supports well"
                run.log.notes.append(f"{text}; DistributedDataParallel will be faster")
                logger.warning("%s", run.log.notes[-1])
        claim = run.claim()
        coordinator = None
        if self._places == 1 and isinstance(self.strategy, Sync) and not self._calls:
            batches.load_ahead(0)
            try:
                yield from _local_steps(run, workload.computer)
            finally:
                batches.close()
            run.finish()
        else:
            try:
                coordinator = self._assemble(run, workload, claim)
                yield from coordinator.steps()
                run.finish()
            finally:
                self.close("the training has ended")
        self.report = self._report(run, coordinator)

    def _assemble(self, run: Run, workload: Workload, claim: Claim) -> Coordinator:
        """Listen for replicas, start them or call for them, and return the coordinator."""
        host = (self._host or own_address()) if self._calls else LOOPBACK
        self._server = self._listen(host, claim.port)
        own, port = self._server.getsockname()[:2]
        self.address = f"{host}:{port}"
        run.record_port(port)
        # Start the replicas before this process starts threads, because only then is forking safe.
        for rank in range(1 if self._calls else self._places):
            seat = ReplicaSeat(address=f"{own}:{port}", token=claim.token, rank=rank)
            self.processes.start(seat, workload, self._server)
        layout = Layout(run.centre.shape, self._codec, self._places)
        terms = Terms(
            token=claim.token,
            epoch=claim.epoch,
            digest=workload.digest,
            max_bytes=layout.grad_bytes,
            places=self._places,
            encrypted=workload.encrypted,
            deadline_seconds=self._deadline,
            heartbeat_seconds=min(2.0, self._deadline / 4),
        )
        self._listener = Listener(self._server, terms)
        self._listener.start()
        if self._calls:
            # Backup replicas beyond the trial's own slots take idle slots.
            self.context.call_replicas(self.address, claim.token, max(0, self._places - self.context.slots))
        return Coordinator(
            run,
            self.strategy,
            layout,
            self._listener.inbox,
            epoch=claim.epoch,
            backups=self._backups,
            policy=self._policy,
            can_come=None if self._calls else self.processes.alive,
        )

    def _listen(self, host: str, last_port: int) -> socket.socket:
        if not self._port and last_port:
            # Replicas that are still alive after the last coordinator's death reconnect to its port.
            try:
                return listen(host, last_port, for_others=self._calls)
            except UsageError:
                logger.info("port %d of the last coordinator is in use; using another one", last_port)
        return listen(host, self._port, for_others=self._calls)

    def _report(self, run: Run, coordinator: Coordinator | None = None) -> Report:
        """Return the report of a finished training, and log the report's warnings."""
        received, sent = self._listener.bytes_moved() if self._listener is not None else (0, 0)
        if self._listener is not None:
            run.log.refused.update(self._listener.refused)
        report = Report(
            backups=coordinator.backups if coordinator else 0,
            log=self.log,
            loss=run.loss,
            bytes_in=received,
            bytes_out=sent,
            predictions=coordinator.predictions() if coordinator else (),
        )
        for text in report.warnings():
            logger.warning("%s", text)
        return report


#: the name with which objectives create a gang
gang = Gang


def _check_local_steps(plan: Plan) -> None:
    """Raise UsageError for arguments of `fit` that a strategy with local steps does not support."""
    for name in ("scale_with_replicas", "weight", "scaler"):
        if getattr(plan, name):
            raise UsageError(f"{name} needs a strategy that averages gradients: Sync or Async")
    if isinstance(plan.schedule, ReduceLROnPlateau):
        raise UsageError("ReduceLROnPlateau needs the loss, which only the coordinator has; use another schedule")


def _local_steps(run: Run, computer: Computer) -> Iterator[None]:
    """Train in this process alone, with exactly the results of a plain training loop.

    Yields None at each step, once the gradient is in ``parameter.grad``; the caller then updates the parameters. A step
    whose loss or gradient is not finite is skipped. Raises UsageError if that is the first step, and Diverged after
    several such steps in a row.
    """
    shape, loss_scale = run.centre.shape, run.centre.loss_scale
    before = shape.vector(shape.buffers.size)
    run.start_clock()
    while not run.is_over:
        shape.buffers.read(before)
        result = computer.backward(run.step, 0, run.context.should_stop, loss_scale=loss_scale.value)
        if result is None:
            return
        loss, weight = result
        if not weight:
            raise UsageError(f"the weight of the batch of step {run.step} is 0; give weight= a function that counts")
        shape.divide_gradients(loss_scale.value)
        if math.isfinite(loss) and shape.has_finite_gradients():
            yield None
            run.record_step((0,), loss)
        else:
            run.refuse(loss)
            run.skip_step()
            shape.buffers.write(before)
        run.after_step()


def _chosen_strategy(strategy: Strategy | None, replicas: int | None, backups: int | Literal["auto"]) -> Strategy:
    """Return `strategy`, or `Sync` with `replicas` and `backups`. Raises UsageError if both are given and differ."""
    if strategy is None:
        if replicas is None:
            raise UsageError("a gang needs replicas=N, or a strategy that names them")
        return Sync(replicas=replicas, backups=backups)
    if replicas not in {None, strategy.replicas}:
        raise UsageError(f"replicas is {replicas}, but the strategy is for {strategy.replicas}; give one of them")
    if backups not in {0, strategy.backups}:
        raise UsageError(f"backups is {backups}, but the strategy is for {strategy.backups}; give one of them")
    return strategy


def _check_arguments(strategy: object, codec: object, on_few: object) -> None:
    """Raise UsageError for arguments of a wrong type or value."""
    for name, value, attribute, example in (
        ("strategy", strategy, "lockstep", "Average(replicas=4)"),
        ("codec", codec, "encode", "Quantize(4)"),
    ):
        if value is not None and (isinstance(value, type) or not hasattr(value, attribute)):
            raise UsageError(f"{name} is {value!r}; give an object such as {example}")
    if on_few not in ("shrink", "wait", "fail"):
        raise UsageError(f"on_few is {on_few!r}; it must be 'shrink', 'wait' or 'fail'")
