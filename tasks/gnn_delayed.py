"""A graph network on a partitioned graph whose parts exchange neighbourhood sums with a delay.

    shadho-celery run tasks.gnn_delayed --trials 20        # embedded, or on the fleet
    python -m tasks.gnn_delayed         # compares delays: bytes, accuracy, seconds, beside a graph in one process

The edges of a generated graph are divided among processes. A vertex with edges in several parts has a copy in each,
with a partial sum of its neighbours. `delay` 0 adds up the copies' sums at once, in every layer, forward and backward.
With `delay` r, one r-th of the shared vertices exchange in each epoch, and the result is used r epochs later. This
sends one r-th of the bytes, and nothing waits for them. Md et al., "DistGNN", arXiv 2104.06700 (its cd-0 and cd-r).
There sums travel along trees of copies; here one all-reduce carries the sums of all vertices of a turn. The processes
are the ranks of a launch, each in one of the trial's slots. A trial takes seconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

    #: vertices, and communities to which they belong; the communities are learned
    vertices: int = 1000
    communities: int = 5
    #: probability of an edge between two vertices of one community, and of different communities
    within: float = 0.02
    across: float = 0.006
    #: features of a vertex, and the distance of the communities' means in units of their noise
    features: int = 32
    signal: float = 0.4
    #: part of the vertices whose community is known to training
    told: float = 0.2
    #: parts of the graph, each in a process of its own
    parts: int = 4
    #: epochs, unless the trial's budget says otherwise
    epochs: int = 100
    #: seed of the graph: the same for every trial, because losses could not be compared otherwise
    graph_seed: int = 0


SETTINGS = Settings()

SPACE = {
    "delay": hp.choice("delay", [0, 1, 2, 5, 10]),
    "width": hp.choice("width", [16, 32, 64]),
    "learning_rate": hp.loguniform("learning_rate", np.log(1e-3), np.log(1e-1)),
}

STUDY = {"trials": 20, "gpus": SETTINGS.parts}  # on a worker without GPUs, as many slots


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Vertices with features and a community each, some of them known. Every edge is stored in both directions."""

    #: (vertices, features)
    features: Tensor
    communities: Tensor
    #: True where the community is known to training
    told: Tensor
    #: (2, edges): from, to
    edges: np.ndarray[Any, np.dtype[np.int64]]


def stochastic_block_graph() -> Graph:
    """Draw the graph of `Settings`: edges are more likely within a community; features are its mean plus much noise."""
    import torch

    rng = np.random.default_rng(SETTINGS.graph_seed)
    size = SETTINGS.vertices
    communities = rng.integers(SETTINGS.communities, size=size)
    alike = communities[:, None] == communities[None]
    drawn = np.triu(rng.random((size, size)) < np.where(alike, SETTINGS.within, SETTINGS.across), k=1)
    means = SETTINGS.signal * rng.standard_normal((SETTINGS.communities, SETTINGS.features))
    features = means[communities] + rng.standard_normal((size, SETTINGS.features))
    return Graph(
        features=torch.as_tensor(features, dtype=torch.float32),
        communities=torch.as_tensor(communities),
        told=torch.as_tensor(rng.random(size) < SETTINGS.told),
        edges=np.array(np.nonzero(drawn)),
    )


def cut(graph: Graph, parts: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The part of every edge, chosen greedily: the least loaded of those that have its vertices, or of all.

    Source: Xie et al., "Distributed Power-law Graph Computing" (Libra), with which DistGNN cuts its graphs.
    """
    known = np.zeros((SETTINGS.vertices, parts), dtype=bool)
    load = np.zeros(parts)
    chosen = np.empty(graph.edges.shape[1], dtype=np.int64)
    for edge in rng.permutation(len(chosen)):
        a, b = graph.edges[:, edge]
        both, either = known[a] & known[b], known[a] | known[b]
        fit = both if both.any() else either if either.any() else np.ones(parts, dtype=bool)
        part = int(np.where(fit, load, np.inf).argmin())
        known[a, part] = known[b, part] = True
        load[part] += 1
        chosen[edge] = part
    return chosen


@dataclass(frozen=True, kw_only=True)
class Part:
    """The copies of vertices that one process has."""

    #: vertex of every copy, in ascending order
    vertex: Tensor
    #: True for one copy of each vertex in all parts, which counts in the loss
    root: Tensor
    #: (copies, copies), sparse: sums the values of a copy's neighbours in this part, divided by the vertex's degree
    neighbours: Tensor
    #: vertices that have copies in several parts, in ascending order; the same in all parts
    shared: Tensor

    def turn(self, delay: int, turn: int) -> tuple[Tensor, Tensor, int]:
        """The copies that exchange in a `turn`, their places among that turn's shared vertices, and the number of
        these.
        """
        import torch

        due = self.shared[self.shared % max(delay, 1) == turn]
        rows = torch.nonzero(torch.isin(self.vertex, due))[:, 0]
        return rows, torch.searchsorted(due, self.vertex[rows]), len(due)


def parts_of(graph: Graph, parts: int) -> list[Part]:
    """Cut `graph`. With one part, every vertex has one copy and nothing is shared."""
    import torch

    size = SETTINGS.vertices
    part = cut(graph, parts, np.random.default_rng(SETTINGS.graph_seed))
    # Both directions of an edge, and a loop for every vertex in the part of the vertex's first edge.
    ends = np.concatenate([graph.edges, graph.edges[::-1]], axis=1)
    home = np.zeros(size, dtype=np.int64)
    home[ends[1][::-1]] = np.tile(part, 2)[::-1]
    ends = np.concatenate([ends, np.tile(np.arange(size), (2, 1))], axis=1)
    part = np.concatenate([part, part, home])
    degree = np.bincount(ends[1], minlength=size)
    own = [np.unique(ends[:, part == number]) for number in range(parts)]
    shared = np.flatnonzero(np.bincount(np.concatenate(own), minlength=size) > 1)
    found = []
    for number, vertex in enumerate(own):
        source, target = np.searchsorted(vertex, ends[:, part == number])
        found.append(
            Part(
                vertex=torch.as_tensor(vertex),
                root=torch.as_tensor(home[vertex] == number),
                neighbours=torch.sparse_coo_tensor(
                    torch.as_tensor(np.stack([target, source])),
                    torch.as_tensor(1 / degree[vertex[target]], dtype=torch.float32),
                    (len(vertex), len(vertex)),
                    check_invariants=True,
                ).coalesce(),
                shared=torch.as_tensor(shared),
            )
        )
    return found


@dataclass(frozen=True)
class UnderWay:
    """Sums of a turn that are being exchanged."""

    #: waits until `total` has the sums over all parts
    wait: Callable[[], object]
    total: Tensor
    #: what this part's copies have added to it
    own: Tensor


@dataclass(kw_only=True)
class Exchange:
    """Gives every copy the values of its vertex's other copies: at once, or for a part of the vertices per epoch,
    later.

    A sum over copies is its own transpose: a layer has one exchange for its sums, and one for their gradients.
    """

    part: Part
    delay: int
    #: bytes that this process has sent: an all-reduce among P processes sends 2 (P - 1) / P of the tensor from each
    sent: float = 0.0
    #: what each copy last received from the others, (copies, features)
    heard: Tensor | None = None
    under_way: dict[int, UnderWay] = field(default_factory=dict)

    def others(self, partial: Tensor, epoch: int) -> Tensor:
        """The values of the other copies of each copy's vertex, current or delayed, in `partial` (copies, features);
        first 0.
        """
        import torch
        import torch.distributed as dist

        if self.heard is None:
            self.heard = torch.zeros_like(partial)
        turn = epoch % max(self.delay, 1)
        rows, places, size = self.part.turn(self.delay, turn)
        if size == 0:  # in all parts alike
            return self.heard
        own = partial[rows]
        total = torch.zeros(size, partial.shape[1]).index_add_(0, places, own)
        work = dist.all_reduce(total, async_op=True)
        processes = dist.get_world_size()
        self.sent += 2 * (processes - 1) / processes * total.numel() * total.element_size()
        # What was sent the last time in this turn, `delay` epochs ago, arrives now; without a delay, what is sent now.
        arriving = self.under_way.get(turn)
        self.under_way[turn] = UnderWay(work.wait, total, own)
        if self.delay == 0:
            arriving = self.under_way.pop(turn)
        if arriving is not None:
            arriving.wait()
            self.heard[rows] = arriving.total[places] - arriving.own
        return self.heard


class Network:
    """Two layers, each a mean over neighbours followed by a linear map. Every copy of a vertex computes its own."""

    def __init__(self, part: Part, *, width: int, delay: int, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        sizes = [SETTINGS.features, width, SETTINGS.communities]
        self.part = part
        self.weights = [
            (torch.randn(size, next_size, generator=generator) / size**0.5).requires_grad_()
            for size, next_size in itertools.pairwise(sizes)
        ]
        self.sums, self.gradients = ([Exchange(part=part, delay=delay) for _ in self.weights] for _ in range(2))

    @property
    def sent(self) -> float:
        """Bytes of sums and their gradients that this process has sent."""
        return sum(exchange.sent for exchange in self.sums + self.gradients)

    def await_exchanges(self) -> None:
        """Wait for the sums that are still being exchanged, which no epoch will use."""
        for exchange in self.sums + self.gradients:
            for each in exchange.under_way.values():
                each.wait()

    def scores(self, hidden: Tensor, epoch: int) -> Tensor:
        """(copies, communities) from the copies' features."""
        for layer, weight in enumerate(self.weights):
            partial = self.part.neighbours @ (hidden.relu() if layer else hidden)
            if partial.requires_grad:  # not that of the first layer, because features have no gradient
                partial.register_hook(partial_gradient(self.gradients[layer], epoch))
            hidden = (partial + self.sums[layer].others(partial.detach(), epoch)) @ weight
        return hidden


def partial_gradient(exchange: Exchange, epoch: int) -> Callable[[Tensor], Tensor]:
    """The backward pass of an exchange: a copy's gradient, and those of the vertex's other copies."""
    return lambda gradient: gradient + exchange.others(gradient, epoch)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Result of learning."""

    #: (part of the vertices with unknown community that are classified wrong, training loss) by epoch
    epochs: list[tuple[float, float]]
    #: bytes of sums and their gradients that all processes sent; None if they were stopped early
    sent: int | None = None
    #: mean seconds of an epoch after the first
    seconds: float | None = None
    #: (vertices, communities) of the last epoch; None if they were stopped early
    scores: np.ndarray[Any, Any] | None = None


def spread(context: RankContext, params: dict[str, Any], seed: int) -> Learned:
    """Learn with one part of the graph in each rank until the last epoch, or until told to stop."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)  # there are enough processes
    count = int(context.budget or SETTINGS.epochs)
    learned, epochs, began = Learned(epochs=[]), [], 0.0
    graph = stochastic_block_graph()
    part = parts_of(graph, context.size)[context.rank]
    network = Network(part, width=params["width"], delay=params["delay"], seed=seed)
    descent = torch.optim.Adam(network.weights, lr=params["learning_rate"])
    vertex = part.vertex[part.root]
    told, communities = graph.told[vertex], graph.communities[vertex]
    for epoch in range(count):
        descent.zero_grad()
        scores = network.scores(graph.features[part.vertex], epoch)[part.root]
        loss = cross_entropy(scores[told], communities[told], reduction="sum") / graph.told.sum()
        loss.backward()
        # Scores are computed before the step: a separate pass would exchange once more.
        wrong = (scores.argmax(dim=1) != communities)[~told].sum() / (~graph.told).sum()
        gradients = [weight.grad for weight in network.weights if weight.grad is not None]
        summed = torch.cat([torch.stack([wrong, loss.detach()]), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(summed)
        for gradient, total in zip(gradients, summed[2:].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))
        descent.step()
        epochs.append((summed[0].item(), summed[1].item()))
        began = began or time.perf_counter()
        context.report(epoch + 1, epochs[-1][0])
        if context.should_stop():
            learned = Learned(epochs=epochs)
            break
    else:
        seconds = (time.perf_counter() - began) / max(count - 1, 1)
        sent, whole = torch.tensor(network.sent), torch.zeros(SETTINGS.vertices, SETTINGS.communities)
        whole[vertex] = scores.detach()
        dist.all_reduce(sent)
        dist.all_reduce(whole)
        learned = Learned(epochs=epochs, sent=round(sent.item()), seconds=seconds, scores=whole.numpy())
    network.await_exchanges()
    return learned


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """The fraction of vertices with unknown community that are classified wrong, and the bytes sent between parts."""
    learned = context.launch(spread, params, context.seed)
    wrong, loss = learned.epochs[-1]
    result: dict[str, float] = {"loss": wrong, "train_loss": loss, "epochs": len(learned.epochs)}
    return result if learned.sent is None else {**result, "bytes": learned.sent}


def spread_each(context: RankContext, delays: Sequence[int], seeds: int) -> list[list[Learned]]:
    """Learn with each delay and each of `seeds` seeds."""
    params = {"width": 32, "learning_rate": 0.01}
    return [[spread(context, {**params, "delay": delay}, seed) for seed in range(seeds)] for delay in delays]


def compare(seeds: int, epochs: int) -> None:
    """Print bytes, accuracy and seconds by delay, beside the whole graph in one process, as means over `seeds`."""
    from shadho_celery.context import LocalContext

    print(f"{SETTINGS.parts} processes      accuracy    kB sent each epoch    ms an epoch")
    for parts, delays in ((1, [0]), (SETTINGS.parts, [0, 1, 2, 5, 10])):
        found = LocalContext(gpus=parts, slots=parts, budget=epochs).launch(spread_each, delays, seeds)
        for delay, runs in zip(delays, found, strict=True):
            name = "one process" if parts == 1 else f"delay {delay}"
            accuracy = 1 - np.mean([run.epochs[-1][0] for run in runs])
            sent = np.mean([(run.sent or 0) / len(run.epochs) for run in runs])
            seconds = np.mean([run.seconds or 0.0 for run in runs])
            print(f"{name:16s} {accuracy:8.3f} {sent / 1e3:18.1f} {1e3 * seconds:17.1f}")


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=compare.__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=SETTINGS.epochs, help="default: %(default)s")
    given = parser.parse_args()
    compare(given.seeds, given.epochs)
