"""URLs of broker and Redis, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

BROKER = "CELERY_BROKER_URL"
REDIS = "SHADHO_REDIS_URL"
DEFAULTS: Mapping[str, str] = {BROKER: "amqp://127.0.0.1", REDIS: "redis://127.0.0.1/0"}


def url(variable: str) -> str:
    """Return the URL in the environment variable, else its default."""
    return os.environ.get(variable) or DEFAULTS[variable]
