"""Optuna's interface to studies: ``import shadho_celery.optuna as optuna``.

A program for Optuna keeps its objective, and changes only its import. Studies are those of this package: recorded in
its store, searched by its samplers, and shown by its commands. Optuna itself need not be installed.
"""

from shadho_celery.optuna import distributions as distributions
from shadho_celery.optuna import exceptions as exceptions
from shadho_celery.optuna import logging as logging
from shadho_celery.optuna import pruners as pruners
from shadho_celery.optuna import samplers as samplers
from shadho_celery.optuna.exceptions import TrialPruned as TrialPruned
from shadho_celery.optuna.study import Study as Study
from shadho_celery.optuna.study import create_study as create_study
from shadho_celery.optuna.study import load_study as load_study
from shadho_celery.optuna.trial import Trial as Trial
from shadho_celery.optuna.trial import create_trial as create_trial
