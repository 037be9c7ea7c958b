"""Hardware-aware distributed hyperparameter search on Celery.

The names of this package are imported when they are first used (PEP 562), so ``import shadho_celery`` stays fast:
hyperopt alone takes more than a second.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shadho_celery.core.system import load_late

if TYPE_CHECKING:
    from hyperopt import STATUS_FAIL, STATUS_OK, Trials, anneal, hp, space_eval

    from shadho_celery.objective.script import checkpoint_dir, params, report, should_stop
    from shadho_celery.program.hyperopt_api import auto, cma, fmin, gp, qmc, rand, tpe
    from shadho_celery.program.optuna_study import optuna_study
    from shadho_celery.program.recorded import list_studies, load_study
    from shadho_celery.program.study import Study, minimize
    from shadho_celery.session.control import Control

__version__ = "0.5.0"

# This must run before hyperopt is imported, which a program that uses this package may do itself.
load_late()

__all__ = [
    "STATUS_FAIL",
    "STATUS_OK",
    "Control",
    "Study",
    "Trials",
    "__version__",
    "anneal",
    "auto",
    "checkpoint_dir",
    "cma",
    "fmin",
    "gp",
    "hp",
    "list_studies",
    "load_study",
    "minimize",
    "optuna_study",
    "params",
    "qmc",
    "rand",
    "report",
    "should_stop",
    "space_eval",
    "tpe",
]

#: by name: the module from which the name is imported when it is first used
_LAZY = {
    **dict.fromkeys(("STATUS_FAIL", "STATUS_OK", "Trials", "anneal", "hp", "space_eval"), "hyperopt"),
    **dict.fromkeys(("auto", "cma", "fmin", "gp", "qmc", "rand", "tpe"), "shadho_celery.program.hyperopt_api"),
    **dict.fromkeys(("list_studies", "load_study"), "shadho_celery.program.recorded"),
    **dict.fromkeys(("checkpoint_dir", "params", "report", "should_stop"), "shadho_celery.objective.script"),
    "Control": "shadho_celery.session.control",
    "minimize": "shadho_celery.program.study",
    "optuna_study": "shadho_celery.program.optuna_study",
    "Study": "shadho_celery.program.study",
    # `celery -A shadho_celery` looks for this name first. Without the name, Celery would import `shadho_celery.celery`
    # itself, and hide the message of an ImportError.
    "app": "shadho_celery.celery",
}


if not TYPE_CHECKING:
    # Hidden from type checkers. With a `__getattr__`, they would accept any name.

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            from shadho_celery.core.names import elsewhere

            if here := elsewhere(name, __all__):
                # ``from shadho_celery import NAME`` replaces the message of an AttributeError, but not that of an
                # ImportError. Other callers need an AttributeError, because hasattr() passes an ImportError on.
                is_from = sys._getframe(1).f_code.co_name == "_handle_fromlist"
                raise (ImportError if is_from else AttributeError)(f"shadho_celery has no {name}; here it is {here}")
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            if _LAZY[name] == "hyperopt":
                # This module imports hyperopt without networkx.
                import_module("shadho_celery.space.compile")
            found = globals()[name] = getattr(import_module(_LAZY[name]), name)
        except (ImportError, AttributeError, TypeError) as error:
            from shadho_celery.core.libraries import failed_import

            if (told := failed_import(error)) is None:
                raise
            if not hasattr(sys.modules["__main__"], "__file__"):
                # In a notebook or at Python's prompt, raise an error, because the process must not end.
                raise ImportError(told) from error
            sys.stderr.write(f"shadho_celery: {told}\n")
            raise SystemExit(2) from None
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
