"""Distributed training of one model in several slots: synchronous SGD with backup replicas, and other strategies.

Each replica computes the gradient of its own batch at the same parameters. The coordinator applies the mean of the
first N gradients of a step and drops the gradients that come later (Chen et al., *Revisiting Distributed Synchronous
SGD*, arXiv 1604.00981). `README.md` in this folder describes how to use the package. Users call the modules in this
folder; the subfolders `wire`, `replica` and `coordinator` are internal.

The room imports `core`, `objective`, `ranks`, `errors` and torch. It opens its own sockets, and calls for replicas
through the trial's context. Therefore the same training runs on a fleet, on a laptop and in a test.
"""

# Studies may import process groups from here. This import comes first, because it checks that torch is installed.
from shadho_celery.ranks import DropCompute, ProcessGroup, process_group
from shadho_celery.training.gang import Gang, gang
from shadho_celery.training.replay import replay
from shadho_celery.training.report import Report
from shadho_celery.training.strategies import Async, Average, Elastic, Sync
from shadho_celery.training.wire.vectors import Quantize

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
