"""A two-layer network distributed over eight processes, none of which holds a whole matrix.

    shadho-celery run tasks.tensor_parallel_25d --trials 5         # embedded, or on the fleet
    python -m tasks.tensor_parallel_25d         # compares it with processes in a line and in a square

The processes form a cube of q by q by d. The rows of a layer's input are split into d*q parts, its columns into q. Its
weights are split into q by q parts, with a copy for each depth. Products are computed by SUMMA, separately in each
depth. The gradients of weights are summed over the depths (Wang et al., "Tesseract", arXiv 2105.14500). With one depth
this is the 2-D method. In the 1-D method, the processes stand in a line: each has all rows, some of the hidden units,
and the weights to and from these (Shoeybi et al., "Megatron-LM", arXiv 1909.08053). The network learns the output of
another network. The processes are the ranks of a launch, each in one of the trial's slots. A trial takes seconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hyperopt import hp

# torch is imported where it is used: the scheduler reads SPACE and needs no training library.
if TYPE_CHECKING:
    from torch import Tensor

    from shadho_celery.context import Context
    from shadho_celery.ranks.launch import RankContext


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


SETTINGS = Settings()

SPACE = {
    "width": hp.choice("width", [32, 64, 128]),
    "learning_rate": hp.loguniform("learning_rate", np.log(0.1), np.log(5.0)),
}

STUDY = {"trials": 5, "gpus": SETTINGS.q**2 * SETTINGS.d}  # on a worker without GPUs, as many slots


class Place:
    """A process's place among the others, and what it has sent to them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        #: bytes that this process has sent
        self.sent = 0

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


class Cube(Place):
    """A place among q*q*d processes, which communicate along rows, columns and pillars."""

    def __init__(self, rank: int, q: int, d: int) -> None:
        super().__init__(rank)
        self.q, self.d = q, d
        self.depth, self.row, self.column = rank // q**2, rank // q % q, rank % q

    def in_row(self) -> list[int]:
        """Ranks of its row, column by column."""
        return [self.rank - self.column + column for column in range(self.q)]

    def in_column(self) -> list[int]:
        """Ranks of its column, row by row."""
        return [self.rank + (row - self.row) * self.q for row in range(self.q)]

    def in_pillar(self) -> list[int]:
        """Ranks at its place in every depth."""
        return [self.rank + (depth - self.depth) * self.q**2 for depth in range(self.d)]

    def part(self, whole: Tensor, *, deep: bool) -> Tensor:
        """This process's block of a matrix: of activations, whose rows are also split over the depths (`deep`), or of
        weights.
        """
        row = self.depth * self.q + self.row if deep else self.row
        stripe = whole.chunk(self.q * (self.d if deep else 1))[row]
        return stripe.chunk(self.q, dim=1)[self.column].contiguous()

    def parts(self, whole: Problem) -> Problem:
        """This process's blocks of all matrices."""
        x, y = (self.part(matrix, deep=True) for matrix in (whole.x, whole.y))
        return Problem(x=x, y=y, weights=[self.part(matrix, deep=False) for matrix in whole.weights])

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """This process's block of the network's outputs."""
        import torch

        return linear(self, torch.nn.functional.gelu(linear(self, x, weights[0])), weights[1])

    def whole(self, blocks: Sequence[np.ndarray[Any, Any]], number: int) -> np.ndarray[Any, Any]:
        """A whole matrix from its blocks in the order of ranks: the outputs (`number` 0) or those of a layer."""
        stripes = [np.concatenate(blocks[at : at + self.q], axis=1) for at in range(0, len(blocks), self.q)]
        return np.concatenate(stripes if number == 0 else stripes[: self.q])


class Line(Place):
    """A place among `size` processes that share the hidden units."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank)
        self.size = size

    def parts(self, whole: Problem) -> Problem:
        """All rows, the columns of the first layer's weights and the rows of the second one's."""
        first, second = whole.weights
        weights = [first.chunk(self.size, dim=1)[self.rank].contiguous(), second.chunk(self.size)[self.rank]]
        return Problem(x=whole.x, y=whole.y, weights=weights)

    def outputs(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The whole outputs: the sum of what the processes' hidden units add to them."""
        import torch

        own = torch.nn.functional.gelu(x @ weights[0]) @ weights[1]
        everybody = list(range(self.size))
        total = self.broadcast(self.reduce(own.detach(), everybody, 0), everybody, 0)
        return own + (total - own.detach())  # the gradient of a sum is that of each of its terms

    def whole(self, blocks: Sequence[np.ndarray[Any, Any]], number: int) -> np.ndarray[Any, Any]:
        """A whole matrix from its blocks: each process has all outputs (`number` 0), and a part of the weights."""
        return blocks[0] if number == 0 else np.concatenate(blocks, axis=1 if number % 2 else 0)


def place_of(rank: int, shape: tuple[int, ...]) -> Cube | Line:
    """The place of a process: (size,) is a line, (q, q, d) a cube."""
    return Line(rank, *shape) if len(shape) == 1 else Cube(rank, shape[0], shape[2])


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


def bytes_of_layer(q: int, d: int, rows: int, inputs: int, outputs: int, *, first: bool = False) -> int:
    """Bytes that all processes of a cube send for one layer, forward and backward, in float32.

    Each of the three products sends the activations' matrix X q-1 times, and in each of the d depths that of the
    weights. The gradients of weights cross the depths d-1 times each way. A `first` layer's input needs no gradient.
    """
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
class Learned:
    """Result of learning: whole matrices."""

    losses: list[float]
    #: bytes that all processes sent; None if they were stopped early
    sent: int | None = None
    #: numbers that one process holds: its blocks of the input, the outputs and the weights
    held: int | None = None
    #: mean seconds of a step after the first
    seconds: float | None = None
    #: of the last step; None if they were stopped early
    outputs: np.ndarray[Any, Any] | None = None
    gradients: Sequence[np.ndarray[Any, Any]] = ()
    weights: Sequence[np.ndarray[Any, Any]] = ()


def spread(context: RankContext, params: dict[str, Any], shape: tuple[int, ...]) -> Learned:
    """Learn on processes of a `shape` until the last step, or until told to stop.

    The shape is (size,) for a line and (q, q, d) for a cube.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # there are enough processes
    steps = int(context.budget or SETTINGS.steps)
    learned, losses, began = Learned(losses=[]), [], 0.0
    place = place_of(context.rank, shape)
    whole = problem(params["width"], context.seed)
    own = place.parts(whole)
    weights = [weight.requires_grad_() for weight in own.weights]
    # On a line every process has the whole loss.
    share = 1 / context.size if isinstance(place, Line) else 1.0
    for step in range(1, steps + 1):
        outputs = place.outputs(own.x, weights)
        loss = (outputs - own.y).square().sum() / whole.y.numel()
        gradients = torch.autograd.grad(loss, weights)
        # Written by hand: importing torch.optim takes longer than a small trial.
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data.sub_(gradient, alpha=params["learning_rate"])
        total = share * loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        began = began or time.perf_counter()
        context.report(step, losses[-1])
        if context.should_stop():
            learned = Learned(losses=losses)
            break
    else:
        seconds = (time.perf_counter() - began) / max(steps - 1, 1)
        sent = torch.tensor(place.sent)
        dist.all_reduce(sent)
        held = sum(matrix.numel() for matrix in (own.x, outputs, *weights))
        blocks = [gathered(block.detach(), context.size) for block in (outputs, *gradients, *weights)]
        matrices = [place.whole(each, number) for number, each in enumerate(blocks)]
        learned = Learned(
            losses=losses,
            sent=int(sent),
            held=held,
            seconds=seconds,
            outputs=matrices[0],
            gradients=matrices[1 : 1 + len(weights)],
            weights=matrices[1 + len(weights) :],
        )
    return learned


def gathered(block: Tensor, size: int) -> list[np.ndarray[Any, Any]]:
    """The blocks of all processes, in the order of ranks."""
    import torch
    import torch.distributed as dist

    blocks = [torch.empty_like(block, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(blocks, block.contiguous())
    return [each.numpy() for each in blocks]


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """The mean squared error of the network in its last step, and the bytes that the processes sent."""
    learned = context.launch(spread, params, (SETTINGS.q, SETTINGS.q, SETTINGS.d))
    result: dict[str, float] = {"loss": learned.losses[-1], "steps": len(learned.losses)}
    return result if learned.sent is None else {**result, "bytes": learned.sent}


def spread_each(context: RankContext, params: dict[str, Any], shapes: Sequence[tuple[int, ...]]) -> list[Learned]:
    """Learn on processes of each shape, which has as many as there are ranks."""
    return [spread(context, params, shape) for shape in shapes]


def compare() -> None:
    """Print what each process sends and holds, and the seconds of a step, for three ways to arrange the processes."""
    from shadho_celery.context import LocalContext

    params = {"width": 128, "learning_rate": 2.0}
    print("processes          loss    kB sent each step   kB held    ms a step")
    print("                           by each process     by each")
    for size, shapes in {4: {"1-D": (4,), "2-D": (2, 2, 1)}, 8: {"1-D": (8,), "2.5-D": (2, 2, 2)}}.items():
        found = LocalContext(gpus=size, slots=size).launch(spread_each, params, [*shapes.values()])
        for (name, shape), learned in zip(shapes.items(), found, strict=True):
            print(
                f"{name:6s} {'x'.join(map(str, shape)):9s} {learned.losses[-1]:7.5f} "
                f"{learned.sent / size / len(learned.losses) / 1e3:12.1f} {4 * learned.held / 1e3:15.1f} "
                f"{1e3 * learned.seconds:12.1f}"
            )


if __name__ == "__main__":
    compare()
