"""Faster imports: lazy import of rarely used third-party modules, and imports without garbage collections.

Most of the time of hyperopt's import is for scipy.stats and scipy.special, which only its own algorithms use.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

#: modules that `import hyperopt` need not load; they import scipy.stats and scipy.special
_OF_HYPEROPT = ("hyperopt.atpe", "hyperopt.tpe")


class _Late(ModuleType):
    """Placeholder for a module until one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        # The import system, and tools that inspect `sys.modules`, look up such names. They must not load the module.
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        loaded = importlib.import_module(self.__name__)
        vars(self).update(vars(loaded))
        return getattr(loaded, name)


def load_late(module: str) -> None:
    """Delay the loading of `module` until its first use, unless it is already loaded."""
    sys.modules.setdefault(module, _Late(module))


def load_hyperopt_late() -> None:
    """Delay the loading of those modules of hyperopt that few programs use."""
    for module in _OF_HYPEROPT:
        load_late(module)


@contextmanager
def placeholder(module: str) -> Iterator[None]:
    """Delay the loading of `module` for the modules that are imported in the block, until they use it.

    Other modules import it as usual, also its submodules. Nothing is delayed if it is already loaded.
    """
    late = sys.modules.setdefault(module, _Late(module))
    try:
        yield
    finally:
        if isinstance(late, _Late):
            del sys.modules[module]


@contextmanager
def without_collections() -> Iterator[None]:
    """Import modules in the block without garbage collections, which would take an eighth of the time.

    Modules live until the end of the process. So all objects are then left out of later collections, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
