"""Process groups: torch.distributed over the slots of a trial, for DistributedDataParallel and other loops.

`process_group` calls the ranks, which run the objective together. `context.launch` starts them within one
worker (`launch`). With `DropCompute` a slow rank stops its step at a deadline. `README.md` beside this file describes
how to use them. `rendezvous` and `children` are for internal use.

The room imports `core`, `objective`, `errors` and torch. It calls for ranks through the trial's context.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "shadho_celery.ranks and shadho_celery.training need torch; install it in the checkout: "
        'pip install -e ".[torch]"',
        name="torch",
    ) from error

from shadho_celery.ranks.drop_compute import DropCompute
from shadho_celery.ranks.process_group import ProcessGroup, process_group

__all__ = ["DropCompute", "ProcessGroup", "process_group"]
