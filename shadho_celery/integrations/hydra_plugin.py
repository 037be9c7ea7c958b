"""Entry of the sweeper in Hydra, which is installed as ``hydra_plugins/shadho_sweeper.py``, where Hydra looks."""

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from shadho_celery.integrations import hydra


class ShadhoSweeper(hydra.ShadhoSweeper):
    """The sweeper. Hydra accepts only a class that is defined in the package hydra_plugins."""


# Without the flag, Hydra would refuse keys that are not here, which `ShadhoSweeper` checks itself.
node = OmegaConf.create({"_target_": f"{__name__}.ShadhoSweeper", "_convert_": "all"}, flags={"struct": False})
ConfigStore.instance().store(group="hydra/sweeper", name="shadho", node=node, provider="shadho_celery")
