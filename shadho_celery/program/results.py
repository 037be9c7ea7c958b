"""Studies of a store, with errors in Python's words."""

from __future__ import annotations

from shadho_celery.errors import Surface, told
from shadho_celery.results import study
from shadho_celery.results.study import StudyResults


@told(Surface.PYTHON)
def load_study(store: str, name: str) -> StudyResults:
    """Return the study called `name`, which may be shortened while it is unique, from the store at a URL.

    The study may run meanwhile; each look at it reads what is recorded at that moment. Raises StudyNotFound, which
    names the candidates if there are several, or StoreError.
    """
    return study.load_study(store, name)


@told(Surface.PYTHON)
def list_studies(store: str) -> list[StudyResults]:
    """Return the studies of the store at a URL, the latest first. Raises StoreError."""
    return study.list_studies(store)
