"""Optuna's names for its log. Studies of this package do not write that log, so most functions have no effect."""

from __future__ import annotations

from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, WARN, WARNING, getLogger

__all__ = ["CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "WARN", "WARNING"]

get_logger = getLogger


def set_verbosity(*_: object) -> None:
    """Do nothing."""


enable_propagation = disable_propagation = enable_default_handler = disable_default_handler = set_verbosity
