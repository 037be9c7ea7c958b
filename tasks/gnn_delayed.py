"""A graph network on a partitioned graph whose parts exchange neighbourhood sums with a delay.

    shadho-celery run tasks.gnn_delayed --trials 20        # embedded, or on the fleet
    python -m tasks.gnn_delayed                                         # alone, in this process

The edges of a generated graph are divided among parts. A vertex with edges in several parts has a copy in each, with a
partial sum of its neighbours. `delay` 0 adds up the copies' sums at once, in every layer, forward and backward. With
`delay` r, one r-th of the cut vertices exchange in each epoch, and the result is used r epochs later. This sends one
r-th of the bytes, and nothing waits for them. Md et al., "DistGNN", arXiv 2104.06700 (its cd-0 and cd-r). Here all
parts are in one process, and the bytes that would be sent are counted. A trial takes a few seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from hyperopt import hp

# torch is imported where it is used: the scheduler reads SPACE and needs no training library.
if TYPE_CHECKING:
    from torch import Tensor

    from shadho_celery.context import Context


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
    #: parts of the graph
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

STUDY = {"trials": 20}


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
class Cut:
    """A graph in parts: copies of its vertices, one after the other, part by part."""

    #: vertex of every copy
    vertex: Tensor
    #: True for one copy of each vertex, which counts in the loss
    root: Tensor
    #: (copies, copies), sparse: sums the values of a copy's neighbours in its own part, divided by the vertex's degree
    neighbours: Tensor
    #: copies of vertices that have more than one
    shared: Tensor


def copies(graph: Graph, parts: int) -> Cut:
    """Cut `graph`. With one part, every vertex has one copy and nothing is shared."""
    import torch

    size = SETTINGS.vertices
    part = cut(graph, parts, np.random.default_rng(SETTINGS.graph_seed))
    # Both directions of an edge, and a loop for every vertex in the part of the vertex's first edge.
    ends = np.concatenate([graph.edges, graph.edges[::-1]], axis=1)
    home = np.zeros(size, dtype=np.int64)
    home[ends[1][::-1]] = np.tile(part, 2)[::-1]
    ends = np.concatenate([ends, np.tile(np.arange(size), (2, 1))], axis=1)
    places = ends + size * np.concatenate([part, part, home])
    kept, numbers = np.unique(places, return_inverse=True)
    source, target = numbers.reshape(places.shape)
    degree = np.bincount(ends[1], minlength=size)
    weight = torch.as_tensor(1 / degree[ends[1]], dtype=torch.float32)
    shape = (len(kept), len(kept))
    count = np.bincount(kept % size, minlength=size)
    return Cut(
        vertex=torch.as_tensor(kept % size),
        root=torch.as_tensor(kept // size == home[kept % size]),
        neighbours=torch.sparse_coo_tensor(
            torch.as_tensor(np.stack([target, source])), weight, shape, check_invariants=True
        ).coalesce(),
        shared=torch.as_tensor(count[kept % size] > 1),
    )


@dataclass(kw_only=True)
class Exchange:
    """Gives every copy the values of its vertex's other copies: at once, or for a part of the vertices per epoch,
    later.

    A sum over copies is its own transpose: a layer has one exchange for its sums, and one for their gradients.
    """

    cut: Cut
    delay: int
    #: bytes sent between parts so far: a copy's row to its vertex's root, and the total back
    crossed: int = 0
    #: what each copy last received from the others, (copies, features)
    heard: Tensor | None = None
    #: what the copies of each turn will receive, by turn
    under_way: dict[int, Tensor] = field(default_factory=dict)

    def others(self, partial: Tensor, epoch: int) -> Tensor:
        """The values of the other copies of each copy's vertex, current or delayed, in `partial` (copies, features);
        first 0.
        """
        import torch

        if self.heard is None:
            self.heard = torch.zeros_like(partial)
        turn = epoch % max(self.delay, 1)
        rows = torch.nonzero(self.cut.shared & (self.cut.vertex % max(self.delay, 1) == turn))[:, 0]
        totals = torch.zeros(SETTINGS.vertices, partial.shape[1]).index_add_(0, self.cut.vertex[rows], partial[rows])
        sent = totals[self.cut.vertex[rows]] - partial[rows]
        leaves = len(rows) - int(self.cut.root[rows].sum())
        self.crossed += 2 * leaves * partial.shape[1] * partial.element_size()
        if self.delay == 0:
            self.heard[rows] = sent
        else:  # what was sent the last time in this turn, `delay` epochs ago, arrives now
            if turn in self.under_way:
                self.heard[rows] = self.under_way[turn]
            self.under_way[turn] = sent
        return self.heard


class Network:
    """Two layers, each a mean over neighbours followed by a linear map. Every copy of a vertex computes its own."""

    def __init__(self, cut: Cut, *, width: int, delay: int, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        sizes = [SETTINGS.features, width, SETTINGS.communities]
        self.cut = cut
        self.weights = [
            (torch.randn(size, next_size, generator=generator) / size**0.5).requires_grad_()
            for size, next_size in itertools.pairwise(sizes)
        ]
        self.sums, self.gradients = ([Exchange(cut=cut, delay=delay) for _ in self.weights] for _ in range(2))

    @property
    def crossed(self) -> int:
        """Bytes of sums and their gradients that were sent between parts."""
        return sum(exchange.crossed for exchange in self.sums + self.gradients)

    def scores(self, hidden: Tensor, epoch: int) -> Tensor:
        """(copies, communities) from the copies' features."""
        for layer, weight in enumerate(self.weights):
            partial = self.cut.neighbours @ (hidden.relu() if layer else hidden)
            if partial.requires_grad:  # not that of the first layer, because features have no gradient
                partial.register_hook(partial_gradient(self.gradients[layer], epoch))
            hidden = (partial + self.sums[layer].others(partial.detach(), epoch)) @ weight
        return hidden


def partial_gradient(exchange: Exchange, epoch: int) -> Callable[[Tensor], Tensor]:
    """The backward pass of an exchange: a copy's gradient, and those of the vertex's other copies."""
    return lambda gradient: gradient + exchange.others(gradient, epoch)


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """The fraction of vertices with unknown community that are classified wrong, and the bytes sent between parts."""
    return train(params, context, SETTINGS.parts)[0]


def train(params: dict[str, Any], context: Context, parts: int) -> tuple[dict[str, float], Tensor]:
    """Loss and metrics after the last epoch, and the scores (vertices, communities), with the graph in `parts`
    parts.
    """
    import torch
    from torch.nn.functional import cross_entropy

    graph = stochastic_block_graph()
    cut = copies(graph, parts)
    network = Network(cut, width=params["width"], delay=params["delay"], seed=context.seed)
    descent = torch.optim.Adam(network.weights, lr=params["learning_rate"])
    order = cut.vertex[cut.root].argsort()
    result: dict[str, float] = {}
    for epoch in range(int(context.budget or SETTINGS.epochs)):
        descent.zero_grad()
        scores = network.scores(graph.features[cut.vertex], epoch)[cut.root][order]
        loss = cross_entropy(scores[graph.told], graph.communities[graph.told])
        loss.backward()
        # Scores are computed before the step: a separate pass would exchange once more.
        wrong = (scores.argmax(dim=1) != graph.communities)[~graph.told].float().mean().item()
        result = {"loss": wrong, "train_loss": loss.item(), "epochs": epoch + 1, "bytes": network.crossed}
        descent.step()
        context.report(epoch + 1, wrong)
        if context.should_stop():
            break
    return result, scores.detach()


if __name__ == "__main__":
    import shadho_celery

    best = shadho_celery.minimize(objective, SPACE, trials=STUDY["trials"], seed=0).best_or_none
    print(f"loss {best.loss:.4f} with {best.params}" if best else "no trial succeeded")
