"""Control with the key of a fleet: fixtures, which a test file imports by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadho_celery.fleet.signing import KEY_FILE, Signer
from shadho_celery.session.control import Control

BYTES = b"a key of sixteen bytes"
SIGNER = Signer(BYTES)


@pytest.fixture
def control(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    """Control whose requests are signed with the fleet's key, which is also in a file that the environment names."""
    path = tmp_path / "shadho.key"
    path.write_bytes(BYTES)
    path.chmod(0o600)
    monkeypatch.setenv(KEY_FILE, str(path))
    return Control(redis=redis_url, store=f"sqlite:///{tmp_path}/none.db")
