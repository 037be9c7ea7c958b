"""Optuna's names for exceptions of this package."""

from shadho_celery.errors import ShadhoError as OptunaError
from shadho_celery.errors import StoreError as StorageInternalError
from shadho_celery.errors import StudyExists as DuplicatedStudyError
from shadho_celery.objective.suggest import TrialPruned

__all__ = ["DuplicatedStudyError", "OptunaError", "StorageInternalError", "TrialPruned"]
