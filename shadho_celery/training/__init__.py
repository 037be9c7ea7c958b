"""Distributed training of one model in several slots: synchronous SGD with backup replicas, and other strategies.

Each replica computes the gradient of its own batch at the same parameters. The coordinator applies the mean of the
first N gradients of a step and drops the gradients that come later (Chen et al., *Revisiting Distributed Synchronous
SGD*, arXiv 1604.00981). `README.md` beside this file describes how to use it. Users call the modules in this folder.
The folders `wire`, `replica`, `coordinator` (gangs) and `ranks` (process groups) are for internal use.

The room imports `core`, `objective`, `errors` and torch, and opens its own sockets. It does not know queues, stores or
schedulers: it calls for replicas through the trial's context. The same training therefore runs on a fleet, on a laptop
and in a test.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'shadho_celery.training needs torch; install it in the checkout: pip install -e ".[torch]"', name="torch"
    ) from error

from shadho_celery.training.drop_compute import DropCompute
from shadho_celery.training.gang import Gang, gang
from shadho_celery.training.process_group import ProcessGroup, process_group
from shadho_celery.training.replay import replay
from shadho_celery.training.report import Report
from shadho_celery.training.strategies import Async, Average, Elastic, Sync
from shadho_celery.training.wire.codecs import Quantize

__all__ = [
    "Async",
    "Average",
    "DropCompute",
    "Elastic",
    "Gang",
    "ProcessGroup",
    "Quantize",
    "Report",
    "Sync",
    "gang",
    "process_group",
    "replay",
]
