"""Training one model on several processes: synchronous SGD with backup workers, and its kin on the same bus.

::

    with gang(context, replicas=8, backups="auto") as g:
        report = g.fit(model, optimizer, data, loss, steps=1000, batch=64)

Every replica computes the gradient of its own batch at the same parameters; the coordinator takes the first N gradients
of a step, applies their mean, and drops the late ones (Chen et al., *Revisiting Distributed Synchronous SGD*, arXiv
1604.00981). Meant for up to 16 replicas and 50 million parameters: all vectors pass through one coordinator,
(N + b) x 8 x D bytes a step. Beyond that use DistributedDataParallel or torchft inside the objective.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'shadho_celery.training needs torch; install it, as with pip install "shadho_celery[torch]"', name="torch"
    ) from error

from shadho_celery.training.codecs import Quantize, Raw
from shadho_celery.training.gang import Gang, gang
from shadho_celery.training.modes import Async, Average, Elastic
from shadho_celery.training.replay import replay
from shadho_celery.training.report import Report
from shadho_celery.training.strategies import Sync

__all__ = ["Async", "Average", "Elastic", "Gang", "Quantize", "Raw", "Report", "Sync", "gang", "replay"]
