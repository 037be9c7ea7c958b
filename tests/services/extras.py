"""Packages of extras that tests do not install by default: without one, a test is skipped, and fails on CI."""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType

import pytest


def needed(module: str, extra: str = "integrations") -> ModuleType:
    """Import a module of an extra. Without it, skip the test, or fail it where CI=true."""
    try:
        with warnings.catch_warnings():
            # Deprecations inside of other packages are not ours.
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f'{error}; in the checkout: pip install -e ".[{extra}]"', allow_module_level=True)
