"""Lazy import of rarely used third-party modules.

Each slot's process imports hyperopt. Half of the time of that import is for scipy.stats, which only `hyperopt.atpe`
uses.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

#: module that `import hyperopt` need not load
OF_HYPEROPT = "hyperopt.atpe"


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


def is_late(module: object) -> bool:
    """Return whether `module` is a placeholder that is loaded at its first use."""
    return isinstance(module, _Late)
