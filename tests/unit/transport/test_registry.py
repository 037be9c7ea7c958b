"""Announcements as they are read; how they come and go is integration's business."""

from __future__ import annotations

import json
from unittest.mock import MagicMock

from shadho_celery.transport.registry import Registry, Worker


def test_an_announcement_is_decoded_again_only_when_it_has_changed() -> None:
    texts = {"shadho:worker:a": {"slots": 1}, "shadho:worker:b": {"slots": 2}}
    client = MagicMock(**{"smembers.return_value": {"a", "b"}})
    client.mget.side_effect = lambda names: [json.dumps(texts[name]) for name in names]
    registry = Registry(client, Worker)
    before = registry.living()
    texts["shadho:worker:b"] = {"slots": 3}
    after = registry.living()
    assert after == {"a": Worker(slots=1), "b": Worker(slots=3)}
    assert after["a"] is before["a"]
