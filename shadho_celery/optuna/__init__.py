"""Optuna's interface to studies: ``import shadho_celery.optuna as optuna``.

A program of Optuna keeps its objective. Studies are those of this package: recorded in its store, searched by its
samplers, and shown by its commands. Optuna itself need not be installed.
"""

from shadho_celery.optuna import distributions, exceptions, logging, pruners, samplers, study, trial
from shadho_celery.optuna.exceptions import TrialPruned
from shadho_celery.optuna.study import Study, create_study, delete_study, get_all_study_names, load_study
from shadho_celery.optuna.trial import FrozenTrial, Trial, TrialState, create_trial

__all__ = [
    "FrozenTrial",
    "Study",
    "Trial",
    "TrialPruned",
    "TrialState",
    "create_study",
    "create_trial",
    "delete_study",
    "distributions",
    "exceptions",
    "get_all_study_names",
    "load_study",
    "logging",
    "pruners",
    "samplers",
    "study",
    "trial",
]
