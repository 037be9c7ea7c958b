"""Search in this process, by its old place."""

from __future__ import annotations

from shadho_celery.program.search import minimize

__all__ = ["minimize"]
