"""Successive halving: many trials at a small budget, the best of them at a larger one, and so on; then again."""

from __future__ import annotations

from shadho_celery.fidelity.brackets import Brackets
from shadho_celery.fidelity.ladder import Ladder


class SuccessiveHalving(Brackets):
    """One bracket after another, each from the lowest budget. The next one starts when the last one has ended.

    A bracket's rungs have the budgets ``most * eta**-k`` down to `least`, and ``eta**k`` trials. The best 1 / eta of a
    rung are promoted to the next one. Promotion waits for a complete rung, so it depends only on the losses. A failed
    trial counts as the worst, a cancelled one is ignored. Source: Jamieson and Talwalkar, "Non-stochastic Best Arm
    Identification and Hyperparameter Optimization", AISTATS 2016; here in the form of bracket s_max of Li et al.,
    "Hyperband", JMLR 18, 2018.

    With `backups` b every rung gets n + b *different* trials, and the next one starts after the first n results, so
    slow trials are not awaited. This is biased if good trials are slow, as large models often are: late trials are not
    promoted, even with a low loss. The study still keeps their results. Copies of late trials (`speculation`) save most
    of that waiting and are not biased.
    """

    def __init__(self, ladder: Ladder) -> None:
        sizes = [ladder.eta**below for below in range(ladder.top, -1, -1)]
        super().__init__(ladder.budgets, [sizes], backups=ladder.backups)
