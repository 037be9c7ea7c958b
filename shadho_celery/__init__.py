"""Hardware-aware distributed hyperparameter search on Celery.

The functions here import their modules when they are called, so that ``import shadho_celery`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shadho_celery.objective.call import Objective
    from shadho_celery.study.study import Study

__all__ = ["__version__", "fmin", "minimize"]
__version__ = "0.5.0"


def minimize(objective: Objective, space: object, **options: Any) -> Study:
    """Search `space` for the params with the least loss, in this process; see `shadho_celery.search.minimize`."""
    from shadho_celery.search import minimize as run

    return run(objective, space, **options)


def fmin(fn: Objective, space: Any, algo: Any = None, max_evals: int | None = None, **options: Any) -> dict[str, Any]:
    """Return the best params by label, as hyperopt's ``fmin`` does; see `shadho_celery.search.fmin`."""
    from shadho_celery.search import fmin as run

    return run(fn, space, algo, max_evals, **options)
