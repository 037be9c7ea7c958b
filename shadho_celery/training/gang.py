"""A gang: one model trained by several processes, in a few lines of an objective.

::

    with gang(context, replicas=8, backups="auto") as g:
        report = g.fit(model, optimizer, data, loss, steps=1000, batch=64)

In a trial with slots of its own the replicas are called from the trial's queue: other workers call the same objective,
with the same params and seed, and `fit` does their part there and leaves the objective by `ReplicaDone`. Anywhere else
they are processes on this machine, and no broker is needed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from shadho_celery.context import Context, ReplicaDone, ReplicaSeat
from shadho_celery.errors import UsageError
from shadho_celery.training.alone import train_alone
from shadho_celery.training.assembly import (
    beyond_limits,
    check_seconds,
    check_settings,
    close_socket,
    listen,
    most_backups,
    own_address,
    setup_of,
)
from shadho_celery.training.bus import Listener, Terms
from shadho_celery.training.centre import ModelCentre
from shadho_celery.training.codecs import Codec, Raw
from shadho_celery.training.coordinator import Coordinator
from shadho_celery.training.data import Batches, Data, Loss, check_loss
from shadho_celery.training.log import Log
from shadho_celery.training.outcome import report_of
from shadho_celery.training.payload import Layout
from shadho_celery.training.processes import Processes
from shadho_celery.training.replica import Delay, Job, serve
from shadho_celery.training.report import Report
from shadho_celery.training.run import Plan, Run
from shadho_celery.training.strategies import Strategy, Sync
from shadho_celery.training.width import Patience

logger = logging.getLogger(__name__)

#: names the address under which other machines reach this one, where it is not found by itself
HOST_VARIABLE = "SHADHO_HOST"


def gang(
    context: Context,
    replicas: int | None = None,
    backups: int | Literal["auto"] = 0,
    *,
    strategy: Strategy | None = None,
    codec: Codec | None = None,
    token: str | None = None,
    host: str | None = None,
    port: int = 0,
    start_seconds: float | None = None,
    grace_seconds: float | None = None,
    on_few: Literal["shrink", "wait", "fail"] = "shrink",
    deadline_seconds: float = 30.0,
    delay: Delay | None = None,
    start_method: Literal["fork", "spawn"] | None = None,
) -> Gang:
    """Return a gang of N `replicas` and b `backups`: by default `Sync`, else as `strategy` says, which names its own.

    Up to 16 replicas and 50 million parameters: beyond that the one coordinator is too slow, and use
    DistributedDataParallel or torchft in the objective. `token`, `host` and `port` are found by themselves.

    It waits for its first N replicas for `start_seconds`: a minute, or in a trial with slots an hour, and there the
    scheduler takes it back sooner where they do not come. While fewer than N are alive: after `grace_seconds` (10, or
    none where lost replicas cannot come back) the gang goes on with fewer and a learning rate in proportion, waits, or
    fails, as `on_few` says. A replica that is silent for `deadline_seconds` is gone. `delay(place, draw)` are seconds
    that a gradient takes at least, to play slow machines. Raises UsageError.
    """
    check_settings(strategy, codec, token, port, on_few)
    # Not to wait for others at all is a grace too.
    check_seconds(start=start_seconds, grace=grace_seconds or None, deadline=deadline_seconds)
    if strategy is None:
        if replicas is None:
            raise UsageError("a gang needs replicas=N, or a strategy that names them")
        strategy = Sync(replicas=replicas, backups=backups)
    elif replicas not in {None, strategy.replicas}:
        raise UsageError(f"replicas is {replicas}, but the strategy is for {strategy.replicas}; give one of them")
    elif backups not in {0, strategy.backups}:
        raise UsageError(f"backups is {backups}, but the strategy is for {strategy.backups}; give one of them")
    calls = context.slots > 1
    if calls and strategy.replicas > context.slots:
        raise UsageError(
            f"the gang is for {strategy.replicas} replicas, and the trial has {context.slots} slots; "
            "let STUDY['slots'] be the number of replicas"
        )
    if start_seconds is None:
        # Where replicas are called, the scheduler takes a gang back that does not come together; they may be getting
        # ready for as long as this.
        start_seconds = 3600.0 if calls else 60.0
    if grace_seconds is None:
        grace_seconds = 10.0 if calls else 0.0
    return Gang(
        context,
        strategy,
        codec or Raw(),
        Patience(start_seconds=start_seconds, grace_seconds=grace_seconds, on_few=on_few),
        token=token,
        host=host,
        port=port,
        deadline_seconds=deadline_seconds,
        delay=delay,
        start_method=start_method,
    )


class Gang:
    """Trains one model; made by `gang`."""

    def __init__(
        self,
        context: Context,
        strategy: Strategy,
        codec: Codec,
        patience: Patience,
        *,
        token: str | None = None,
        host: str | None = None,
        port: int = 0,
        deadline_seconds: float = 30.0,
        delay: Delay | None = None,
        start_method: Literal["fork", "spawn"] | None = None,
    ) -> None:
        self.context, self.strategy, self.codec, self.patience = context, strategy, codec, patience
        #: whose gradients made each step; `replay` computes the training again from it
        self.log = Log()
        #: the replicas that run on this machine
        self.processes = Processes(start_method)
        #: where the coordinator listens, once it does
        self.address: str | None = None
        self._token, self._host, self._port, self._deadline = token, host, port, deadline_seconds
        self._delay = delay
        self._listener: Listener | None = None
        self._server: socket.socket | None = None
        self._used = False

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("the training has ended" if kind is None else f"the trial ended with {kind.__name__}")

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        loss: Loss,
        *,
        steps: int,
        batch: int = 32,
        micro_batches: int = 1,
        seed: int | None = None,
        on_step: Callable[[int, float], None] | None = None,
        evaluate: Callable[[nn.Module], float] | None = None,
        report_every: int | None = None,
        checkpoint_every: int = 100,
        ema: float | None = None,
    ) -> Report:
        """Take `steps` steps, counted from a checkpoint where there is one, and return what came of it.

        `data` are tensors of equal first dimension or a map-style Dataset; `loss(model, batch)` returns the mean loss
        of a batch of `batch` examples, a scalar tensor. `evaluate(model)` is reported to the context, at the end at the
        latest; without it, the training loss is. With `ema`, the moving average of the parameters is what is evaluated
        and what the model has at the end. Ends early where ``context.should_stop()``.

        Raises UsageError for what cannot be trained, a loss that is NaN from the first step for one; Diverged where no
        gradient is finite any more; ShadhoError where the gang falls apart.
        """
        if self._used:
            raise UsageError("a gang trains one model once; make another for the next")
        self._used = True
        self.context.gangs += 1
        check_loss(loss)
        plan = Plan(
            steps=steps,
            batch=batch,
            micro_batches=micro_batches,
            seed=self.context.seed if seed is None else seed,
            on_step=on_step,
            evaluate=evaluate,
            report_every=report_every,
            checkpoint_every=checkpoint_every,
        )
        centre = ModelCentre(model, optimizer, average=ema)
        backups = most_backups(self.strategy)
        places = self.strategy.replicas + backups
        # Before any process is started: what is wrong with the data is an error here.
        batches = Batches(data, batch=batch, seed=plan.seed, places=places, micro_batches=micro_batches)
        job = Job(
            model=model,
            optimizer=optimizer,
            data=data,
            loss=loss,
            strategy=self.strategy,
            codec=self.codec,
            setup=setup_of(centre.shape, self.strategy, self.codec, batches.digest, self.context.gangs),
            delay=self._delay,
        )
        if self.context.replica is not None:
            return self._take_part(self.context.replica, job, places)
        run = Run(plan, centre, self.context, setup=job.setup, places=places)
        self.log = run.log
        for text in beyond_limits(places, centre.size):
            logger.warning("%s", text)
            run.log.notes.append(text)
        if places == 1 and isinstance(self.strategy, Sync) and self.context.slots == 1:
            run.claim(self._token)
            train_alone(run, loss, batches)
            run.finish()
            return report_of(run, self.strategy)
        return self._train(run, job, places, backups)

    def present(self) -> int:
        """How many replicas are there; 0 where this process trains alone."""
        return self._listener.present() if self._listener is not None else 0

    def close(self, reason: str, *, error: bool = False) -> None:
        """Tell the replicas that it is over, and see that the local ones end."""
        if self._server is not None:
            close_socket(self._server)
        if self._listener is not None:
            self._listener.close(reason, error=error)
        self.processes.close()

    def _take_part(self, seat: ReplicaSeat, job: Job, places: int) -> Report:
        """Do a replica's part and leave the objective, by ReplicaDone; a gang before its own it lets pass."""
        if self.context.gangs < seat.call:
            # Nothing is needed of this one: the parameters of the later gang are its coordinator's to send.
            return Report(replicas=self.strategy.replicas, backups=0, log=Log(places=places))
        serve(seat, job, self.context.should_stop)
        raise ReplicaDone

    def _train(self, run: Run, job: Job, places: int, backups: int) -> Report:
        """Do the coordinator's part."""
        try:
            coordinator = self._assemble(run, job, places, backups)
            coordinator.train()
            run.finish()
        finally:
            self.close("the training has ended")
        assert self._listener is not None
        moved, turned_away = self._listener.bytes_moved(), self._listener.refused
        return report_of(run, self.strategy, coordinator, moved=moved, turned_away=turned_away)

    def _assemble(self, run: Run, job: Job, places: int, backups: int) -> Coordinator:
        """Listen, and have the replicas come."""
        calls = self.context.slots > 1
        claim = run.claim(self._token)
        token = claim.token if claim else self._token or secrets.token_hex(16)
        epoch = claim.epoch if claim else 1
        self._server = self._listen("" if calls else "127.0.0.1", claim.port if claim else 0)
        port = self._server.getsockname()[1]
        host = (self._host or os.environ.get(HOST_VARIABLE) or own_address()) if calls else "127.0.0.1"
        self.address = f"{host}:{port}"
        run.listening(port)
        # Before there is any thread of ours: forking is safe then.
        for rank in range(1 if calls else places):
            self.processes.start(ReplicaSeat(address=f"127.0.0.1:{port}", token=token, rank=rank), job, self._server)
        layout = Layout(run.centre.shape, self.codec)
        terms = Terms(
            token=token,
            epoch=epoch,
            places=places,
            setup=job.setup,
            welcome={
                "seed": run.plan.seed,
                "batch": run.plan.batch,
                "micro_batches": run.plan.micro_batches,
                "places": places,
            },
            most_bytes=layout.most_grad_bytes,
            deadline_seconds=self._deadline,
            ping_seconds=min(2.0, self._deadline / 4),
        )
        self._listener = Listener(self._server, terms)
        self._listener.start()
        if calls:
            self.context.call_replicas(self.address, token, backups)
        return Coordinator(
            run,
            self.strategy,
            layout,
            self._listener,
            epoch=epoch,
            backups=backups,
            patience=self.patience,
            can_come=None if calls else self.processes.alive,
        )

    def _listen(self, host: str, last_port: int) -> socket.socket:
        if not self._port and last_port:
            # Replicas that outlived the last coordinator look for it there.
            try:
                return listen(host, last_port)
            except UsageError:
                logger.info("port %d of the last coordinator is taken; another will do", last_port)
        return listen(host, self._port)
