"""Process groups of torch.distributed: processes (ranks) of one trial, for DistributedDataParallel and similar
programs.

With `process_group`, all ranks run the objective, each in one of the trial's slots. `context.launch` runs a function in
several ranks on one worker (`launch`). With `DropCompute`, a slow rank stops its step at a deadline. `README.md` in
this folder describes how to use them. `rendezvous` and `children` are internal.

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
