"""Where a training stands, on disk: so that a coordinator that is started again goes on, and the old one cannot.

Each start claims the files with an epoch one higher than the last. A coordinator that was thought dead finds the claim
of its successor before it writes, and ends.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shadho_celery.errors import ShadhoError


class Superseded(ShadhoError):
    """Another coordinator has taken this training over; this one ends and has written nothing since."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One start of a coordinator."""

    #: from 1, one more at each start
    epoch: int
    #: the gang's secret: replicas that outlived the last coordinator know it
    token: str
    #: where they look for it; 0 before it is known
    port: int = 0
    #: who claims
    owner: str


class Checkpoints:
    """The files of one training in a trial's folder, named by a digest of what it trains."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._state = folder / f"gang-{digest}.pt"
        self._claims = folder / f"gang-{digest}.json"
        self._claim: Claim | None = None

    @property
    def path(self) -> Path:
        """The file of the state."""
        return self._state

    def claim(self, token: str | None) -> Claim:
        """Take the training over; the token is the last one's where none is given."""
        last = self._read()
        for part in self._state.parent.glob(f"{self._state.stem}.*.part"):
            # Of a start that was killed while it wrote.
            part.unlink(missing_ok=True)
        self._claim = Claim(
            epoch=last.epoch + 1 if last else 1,
            token=token or (last.token if last else secrets.token_hex(16)),
            port=last.port if last else 0,
            owner=secrets.token_hex(8),
        )
        self._write_claim(self._claim)
        return self._claim

    def listening(self, port: int) -> None:
        """Note where replicas find this coordinator."""
        assert self._claim is not None
        self._claim = Claim(epoch=self._claim.epoch, token=self._claim.token, port=port, owner=self._claim.owner)
        self._write_claim(self._claim)

    def save(self, state: dict[str, Any]) -> None:
        """Write the state whole, in place of the last. Raises Superseded where another has claimed the training."""
        self._check()
        with _replacing(self._state) as path:
            torch.save(state, path)
            # Again: it may have happened meanwhile, and the write took the longest.
            self._check()

    def load(self) -> dict[str, Any] | None:
        """The last state, None where there is none."""
        if not self._state.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self._state, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ShadhoError(
                f"the checkpoint {self._state} cannot be read ({error}); remove it to start anew"
            ) from error
        return state

    def remove(self) -> None:
        """The training is over: nothing of it is needed."""
        if self._read() == self._claim:
            for path in (self._state, self._claims):
                path.unlink(missing_ok=True)

    def _check(self) -> None:
        # Where there is no claim at all, whoever took over has finished.
        last = self._read()
        if self._claim is None or last is None or last.owner != self._claim.owner:
            raise Superseded

    def _read(self) -> Claim | None:
        try:
            return Claim(**json.loads(self._claims.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ShadhoError(f"{self._claims} cannot be read ({error}); remove it to start anew") from error

    def _write_claim(self, claim: Claim) -> None:
        with _replacing(self._claims) as path:
            # `mkstemp` made it readable by its owner only: it has the token in it.
            path.write_text(json.dumps(vars(claim)))


class _replacing:  # noqa: N801
    """A file to be written that takes the place of another when all went well."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(dir=self._target.parent, prefix=self._target.name, suffix=".part")
        os.close(handle)
        self._path = Path(name)
        return self._path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self._path.replace(self._target)
            except FileNotFoundError:
                # Removed by the next claim.
                raise Superseded from None
        else:
            with suppress(FileNotFoundError):
                self._path.unlink()
