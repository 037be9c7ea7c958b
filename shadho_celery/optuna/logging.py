"""Optuna's names for its log. Studies write none here: these functions have no effect."""

from __future__ import annotations

from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, WARN, WARNING, getLogger

__all__ = ["CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "WARN", "WARNING"]

get_logger = getLogger


def set_verbosity(verbosity: int) -> None:
    """Have no effect."""


def _have_no_effect() -> None:
    """Have no effect."""


enable_propagation = disable_propagation = _have_no_effect
enable_default_handler = disable_default_handler = _have_no_effect
