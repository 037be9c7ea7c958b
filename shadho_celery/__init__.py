"""Hardware-aware distributed hyperparameter search on Celery.

The names of this package are imported when they are first used (PEP 562), so that ``import shadho_celery`` stays light:
hyperopt alone takes more than a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shadho_celery.program.hyperopt_api import (
        STATUS_FAIL,
        STATUS_OK,
        Trials,
        anneal,
        fmin,
        hp,
        rand,
        space_eval,
        tpe,
    )
    from shadho_celery.program.results import list_studies, load_study
    from shadho_celery.program.search import minimize
    from shadho_celery.program.study import Study

__version__ = "0.5.0"

__all__ = [
    "STATUS_FAIL",
    "STATUS_OK",
    "Study",
    "Trials",
    "__version__",
    "anneal",
    "fmin",
    "hp",
    "list_studies",
    "load_study",
    "minimize",
    "rand",
    "space_eval",
    "tpe",
]

#: module of each name that is imported when it is first used
_LAZY = {
    **dict.fromkeys(("STATUS_FAIL", "STATUS_OK", "anneal", "hp", "rand", "space_eval", "tpe"), "hyperopt"),
    **dict.fromkeys(("Trials", "fmin"), "shadho_celery.program.hyperopt_api"),
    **dict.fromkeys(("list_studies", "load_study"), "shadho_celery.program.results"),
    "minimize": "shadho_celery.program.search",
    "Study": "shadho_celery.program.study",
}


if not TYPE_CHECKING:
    # A type checker would take any name for one of these.

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
