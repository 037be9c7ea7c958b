"""Modules of others that others import and hardly anybody uses: they are loaded at their first use.

Each slot's process imports hyperopt. Half of that time goes into scipy.stats, which only `hyperopt.atpe` wants.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

#: what `import hyperopt` need not load
OF_HYPEROPT = "hyperopt.atpe"


class _Late(ModuleType):
    """Stands for a module, until one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        # The import itself, and tools that look through `sys.modules`, ask for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        loaded = importlib.import_module(self.__name__)
        vars(self).update(vars(loaded))
        return getattr(loaded, name)


def load_late(module: str) -> None:
    """Have `module` loaded at its first use, by whomever it is imported, unless it is loaded already."""
    sys.modules.setdefault(module, _Late(module))


def is_late(module: object) -> bool:
    """Return whether `module` stands for one that is loaded at its first use."""
    return isinstance(module, _Late)
