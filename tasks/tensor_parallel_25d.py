"""A two-layer network distributed over eight processes, none of which holds a whole matrix.

    shadho-celery run tasks.tensor_parallel_25d --trials 5         # embedded, or on the fleet
    python -m tasks.tensor_parallel_25d                                         # alone, in this process

The processes form a cube of q by q by d. The rows of a layer's input are split into d*q parts, its columns into q. Its
weights are split into q by q parts, with a copy for each depth. Products are computed by SUMMA, separately in each
depth. The gradients of weights are summed over the depths (Wang et al., "Tesseract", arXiv 2105.14500). The network
learns the output of another network. The processes communicate through torch's gloo, find one another through a file,
and end with the trial, which takes about ten seconds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from hyperopt import hp

# torch is imported where it is used: the scheduler reads SPACE and needs no training library.
if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

    from torch import Tensor

    from shadho_celery.context import Context


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: processes in a row and in a column of a depth
    q: int = 2
    #: depths
    d: int = 2
    #: rows of the input, its columns, and columns of the output; divisible by q*d, q and q
    rows: int = 256
    inputs: int = 32
    outputs: int = 16
    #: hidden units of the network whose output is learned
    teacher_width: int = 32
    #: steps of gradient descent, unless the trial's budget says otherwise
    steps: int = 100
    #: seed of the data and of the network to learn: the same for every trial, because losses could not be compared
    #: otherwise
    data_seed: int = 0
    #: seconds without a message from the others after which a process gives up
    timeout: float = 60.0


SETTINGS = Settings()

SPACE = {
    "width": hp.choice("width", [32, 64, 128]),
    "learning_rate": hp.loguniform("learning_rate", np.log(0.1), np.log(5.0)),
}

STUDY = {"trials": 5}


class Cube:
    """A process's position among the q*q*d, and its communication with its row, its column and its pillar."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        q = SETTINGS.q
        self.depth, self.row, self.column = rank // q**2, rank // q % q, rank % q
        #: bytes that this process has sent
        self.sent = 0

    def in_row(self) -> list[int]:
        """Ranks of its row, column by column."""
        return [self.rank - self.column + column for column in range(SETTINGS.q)]

    def in_column(self) -> list[int]:
        """Ranks of its column, row by row."""
        return [self.rank + (row - self.row) * SETTINGS.q for row in range(SETTINGS.q)]

    def in_pillar(self) -> list[int]:
        """Ranks at its place in every depth."""
        return [self.rank + (depth - self.depth) * SETTINGS.q**2 for depth in range(SETTINGS.d)]

    def send(self, block: Tensor, to: int) -> None:
        import torch.distributed as dist

        dist.send(block.contiguous(), to)
        self.sent += block.numel() * block.element_size()

    def receive(self, like: Tensor, source: int) -> Tensor:
        import torch
        import torch.distributed as dist

        block = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(block, source)
        return block

    def broadcast(self, block: Tensor, group: Sequence[int], root: int) -> Tensor:
        """The block of rank `root`, sent to all of the `group`."""
        if self.rank != root:
            return self.receive(block, root)
        for other in group:
            if other != root:
                self.send(block, other)
        return block

    def reduce(self, block: Tensor, group: Sequence[int], root: int) -> Tensor:
        """The sum over the `group` at rank `root`; on other ranks the block is unchanged."""
        if self.rank != root:
            self.send(block, root)
            return block
        for other in group:
            if other != root:
                block = block + self.receive(block, other)
        return block

    def part(self, whole: Tensor, *, deep: bool) -> Tensor:
        """This process's block of a matrix: of activations, whose rows are also split over the depths (`deep`), or of
        weights.
        """
        row = self.depth * SETTINGS.q + self.row if deep else self.row
        stripe = whole.chunk(SETTINGS.q * (SETTINGS.d if deep else 1))[row]
        return stripe.chunk(SETTINGS.q, dim=1)[self.column].contiguous()


def product(cube: Cube, x: Tensor, w: Tensor) -> Tensor:
    """This process's block of X W: in step k, the k-th column of X's blocks meets the k-th row of W's (SUMMA, "AB")."""
    y = x.new_zeros(x.shape[0], w.shape[1])
    for row_root, column_root in zip(cube.in_row(), cube.in_column(), strict=True):
        y += cube.broadcast(x, cube.in_row(), row_root) @ cube.broadcast(w, cube.in_column(), column_root)
    return y


def input_gradient(cube: Cube, dy: Tensor, w: Tensor) -> Tensor:
    """This process's block of dY W': step k makes the k-th column of the result, summed along the row (SUMMA,
    "AB'").
    """
    mine = dy
    for row_root, column_root in zip(cube.in_row(), cube.in_column(), strict=True):
        block = cube.reduce(dy @ cube.broadcast(w, cube.in_column(), column_root).T, cube.in_row(), row_root)
        mine = block if row_root == cube.rank else mine
    return mine


def weight_gradient(cube: Cube, x: Tensor, dy: Tensor) -> Tensor:
    """This process's block of X' dY: step k makes the k-th row of the result, summed along the column and the
    depths.
    """
    mine = dy
    for row_root, column_root in zip(cube.in_row(), cube.in_column(), strict=True):
        block = cube.reduce(cube.broadcast(x, cube.in_row(), row_root).T @ dy, cube.in_column(), column_root)
        mine = block if column_root == cube.rank else mine
    pillar = cube.in_pillar()
    return cube.broadcast(cube.reduce(mine, pillar, pillar[0]), pillar, pillar[0])


def bytes_of_layer(rows: int, inputs: int, outputs: int, *, first: bool = False) -> int:
    """Bytes that all processes send for one layer, forward and backward, in float32.

    Each of the three products sends the activations' matrix X q-1 times, and in each of the d depths that of the
    weights. The gradients of weights cross the depths d-1 times each way. A `first` layer's input needs no gradient.
    """
    q, d = SETTINGS.q, SETTINGS.d
    products = 2 if first else 3
    return 4 * (products * (q - 1) * (rows * inputs + d * inputs * outputs) + 2 * (d - 1) * inputs * outputs)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is learned and where learning starts: whole matrices, the same in every process."""

    x: Tensor
    y: Tensor
    weights: list[Tensor]


def problem(width: int, seed: int) -> Problem:
    """Random inputs, the outputs of a random network, and the initial weights of a network with `width` hidden
    units.
    """
    import torch

    def weights(sizes: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
        return [torch.randn(a, b, generator=generator) / a**0.5 for a, b in itertools.pairwise(sizes)]

    data = torch.Generator().manual_seed(SETTINGS.data_seed)
    x = torch.randn(SETTINGS.rows, SETTINGS.inputs, generator=data)
    inner, outer = weights((SETTINGS.inputs, SETTINGS.teacher_width, SETTINGS.outputs), data)
    start = weights((SETTINGS.inputs, width, SETTINGS.outputs), torch.Generator().manual_seed(seed))
    return Problem(x=x, y=torch.nn.functional.gelu(x @ inner) @ outer, weights=start)


def linear(cube: Cube, x: Tensor, w: Tensor) -> Tensor:
    """X W as an operation that torch can differentiate."""
    import torch

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return product(cube, x, w)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor]:
            x, w = ctx.saved_tensors
            dx = input_gradient(cube, dy, w) if ctx.needs_input_grad[0] else None
            return dx, weight_gradient(cube, x, dy)

    apply: Callable[..., Tensor] = Linear.apply
    return apply(x, w)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the processes compute together."""

    width: int
    rate: float
    seed: int
    steps: int


def learn(cube: Cube, job: Job, pipe: Connection) -> None:
    """The work of each process: it sends its part of the loss at every step, and finally its bytes and its blocks."""
    import torch

    whole = problem(job.width, job.seed)
    x, y = (cube.part(matrix, deep=True) for matrix in (whole.x, whole.y))
    weights = [cube.part(matrix, deep=False).requires_grad_() for matrix in whole.weights]
    for _ in range(job.steps):
        outputs = linear(cube, torch.nn.functional.gelu(linear(cube, x, weights[0])), weights[1])
        loss = (outputs - y).square().sum() / whole.y.numel()
        gradients = torch.autograd.grad(loss, weights)
        pipe.send(loss.item())
        # Written by hand: importing torch.optim takes longer than a small trial.
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data.sub_(gradient, alpha=job.rate)
    pipe.send((cube.sent, [block.detach().numpy() for block in (outputs, *gradients, *weights)]))


def work(rank: int, folder: str, pipe: Connection, job: Job) -> None:
    """Join the other processes, do the `job` with them, and leave when they are done too."""
    threading.Thread(target=leave_with_parent, args=(folder,), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # there are enough processes
    size = SETTINGS.q**2 * SETTINGS.d
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SETTINGS.timeout),
    )
    learn(Cube(rank), job, pipe)
    dist.barrier()
    dist.destroy_process_group()


def leave_with_parent(folder: str) -> None:
    """End this process, and remove `folder`, when its parent has ended. If the parent was killed, nothing else
    would.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


@contextmanager
def processes(job: Job) -> Iterator[list[Connection]]:
    """Start the cube's processes on a `job`. Yields a pipe from each, and ends them."""
    # Children of a server that has imported what they need: they start fast and copy none of this process's threads.
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["torch", "hyperopt"])
    with ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="shadho-cube-"))
        pipes: list[Connection] = []
        children: list[ForkServerProcess] = []
        ending.callback(end, children)
        for rank in range(SETTINGS.q**2 * SETTINGS.d):
            ours, theirs = start.Pipe(duplex=False)
            pipes.append(ending.enter_context(ours))
            with theirs:  # open only in the child, so that the pipe ends when the child does
                children.append(start.Process(target=work, args=(rank, folder, theirs, job), daemon=True))
                children[-1].start()
        yield pipes


def end(children: list[ForkServerProcess]) -> None:
    """End those that have not ended by themselves."""
    for child in children:
        child.terminate()
    for child in children:
        child.join()


def assembled(blocks: Sequence[np.ndarray[Any, Any]], *, deep: bool) -> np.ndarray[Any, Any]:
    """The whole matrix whose blocks are held by the processes, in the order of ranks: the inverse of `Cube.part`."""
    stripes = [np.concatenate(blocks[at : at + SETTINGS.q], axis=1) for at in range(0, len(blocks), SETTINGS.q)]
    return np.concatenate(stripes if deep else stripes[: SETTINGS.q])


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Result of learning: whole matrices."""

    losses: list[float]
    #: bytes that all processes sent; None if they were stopped early
    sent: int | None = None
    #: of the last step; None if they were stopped early
    outputs: np.ndarray[Any, Any] | None = None
    gradients: Sequence[np.ndarray[Any, Any]] = ()
    weights: Sequence[np.ndarray[Any, Any]] = ()


def spread(params: dict[str, Any], context: Context) -> Learned:
    """Learn on the cube of processes until the last step, or until told to stop."""
    steps = int(context.budget or SETTINGS.steps)
    losses: list[float] = []
    job = Job(width=params["width"], rate=params["learning_rate"], seed=context.seed, steps=steps)
    with processes(job) as pipes:
        for step in range(1, steps + 1):
            losses.append(sum(received(pipe) for pipe in pipes))
            context.report(step, losses[-1])
            if context.should_stop():
                return Learned(losses=losses)
        told = [received(pipe) for pipe in pipes]
    outputs, *others = (
        assembled(blocks, deep=number == 0) for number, blocks in enumerate(zip(*(t[1] for t in told), strict=True))
    )
    half = len(others) // 2
    sent = sum(sent for sent, _ in told)
    return Learned(losses=losses, sent=sent, outputs=outputs, gradients=others[:half], weights=others[half:])


def received(pipe: Connection) -> Any:
    """The next message of a process. Raises RuntimeError if it has ended instead."""
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a process of the cube ended early; its last output is on standard error") from None


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """The mean squared error of the network in its last step, and the bytes that the processes sent."""
    learned = spread(params, context)
    result: dict[str, float] = {"loss": learned.losses[-1], "steps": len(learned.losses)}
    return result if learned.sent is None else {**result, "bytes": learned.sent}


if __name__ == "__main__":
    import shadho_celery

    best = shadho_celery.minimize(objective, SPACE, trials=STUDY["trials"], seed=0).best_or_none
    print(f"loss {best.loss:.4f} with {best.params}" if best else "no trial succeeded")
