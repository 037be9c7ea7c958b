"""Recorded studies in a program and in notebooks: `load_study`, `list_studies`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadho_celery.core.arguments import refuse_unknown
from shadho_celery.core.checks import short
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults
from shadho_celery.store.sql import SqlStore

if TYPE_CHECKING:
    from shadho_celery.pages.notebook import StudyPictures


class ShownStudy(StudyResults):
    """The results of a study, which a notebook displays with its summary, best trials and charts."""

    @property
    def charts(self) -> StudyPictures:
        """Charts of the study, such as ``study.charts.history()``. Each reads the study when it is made."""
        # Imported late, as below, because only notebooks need it.
        from shadho_celery.pages.notebook import StudyPictures

        return StudyPictures(self)

    def _repr_html_(self) -> str:
        from shadho_celery.pages.notebook import study_html

        return study_html(self)


@refuse_unknown
def load_study(store: str, name: str) -> ShownStudy:
    """Return the study called `name`, which may be shortened while it is unique, from the store at a URL.

    `name` may also be that of a module, for its latest study. The study may run meanwhile: each access reads what is
    recorded at that moment. Raises StudyNotFound, which names the candidates if there are several, or StoreError.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"a study's name is a text, not {short(name, 60)}")
    opened = SqlStore(store, read_only=True)
    return ShownStudy(opened, opened.find(name, told=lambda line: None))


def list_studies(store: str) -> list[ShownStudy]:
    """Return the studies of the store at a URL, the latest first. Raises StoreError."""
    opened = SqlStore(store, read_only=True)
    return [ShownStudy(opened, record) for record in opened.records()]
