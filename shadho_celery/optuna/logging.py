"""Optuna's names for its log. Studies of this package do not write that log, so most functions have no effect."""

from __future__ import annotations

from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, WARN, WARNING, getLogger

__all__ = ["CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "WARN", "WARNING"]

get_logger = getLogger


def _have_no_effect(*_: object) -> None:
    pass


set_verbosity = enable_propagation = disable_propagation = _have_no_effect
enable_default_handler = disable_default_handler = _have_no_effect
