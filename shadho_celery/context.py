"""Second argument of an objective: `Context`, and `LocalContext` to call an objective without a study."""

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.objective.context import Context, LocalContext, RankLost, ReplicaDone, TrialStopped, TrialTimeout

__all__ = ["Context", "LocalContext", "RankLost", "ReplicaDone", "ReplicaSeat", "TrialStopped", "TrialTimeout"]
