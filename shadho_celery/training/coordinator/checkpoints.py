"""Checkpoints of a training, by which a coordinator also notices that it was replaced.

Each start claims the files with an epoch that is one higher than the last epoch. A coordinator that was assumed dead
finds its successor's claim before it writes, and ends.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TypedDict

import msgspec
import torch
from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.addresses import make_token
from shadho_celery.core.files import PART, replacing
from shadho_celery.errors import ShadhoError
from shadho_celery.training.coordinator.centre import CentreState


class Superseded(ShadhoError):
    """Another coordinator has taken over this training. This one ends and has written nothing since."""


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record of one start of a coordinator, in a file beside the checkpoint."""

    #: number of the start, from 1
    epoch: Annotated[int, Meta(ge=1)]
    #: secret of the gang, kept from start to start, so that replicas that outlive a coordinator know it
    token: str
    #: port on which the coordinator listens; 0 before it is known
    port: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    #: random name of the start
    owner: str


class TrainingState(TypedDict):
    """Content of a checkpoint."""

    centre: CentreState
    #: number of steps done
    step: int
    #: the log's steps as plain tuples
    steps: list[tuple[Any, ...]]
    #: the log's counters by name; their keys are places or causes
    counts: dict[str, dict[int, int] | dict[str, int]]


class Checkpoints:
    """Files of one training in a trial's folder, named by a digest of its settings."""

    def __init__(self, folder: Path, digest: str) -> None:
        #: file that holds the state
        self.path = folder / f"gang-{digest}.pt"
        self._claims = folder / f"gang-{digest}.json"
        self._claim: Claim | None = None

    def other(self) -> Path | None:
        """Return the checkpoint of a training with other settings in the same folder, or None."""
        others = (path for path in self.path.parent.glob("gang-*.pt") if path != self.path)
        return min(others, default=None)

    def claim(self) -> Claim:
        """Claim the training for this coordinator. Reuse token and port of the last start, if there was one."""
        last = self._read_claim()
        for part in self.path.parent.glob(f".{self.path.stem}.*{PART}"):
            # A coordinator that was killed while writing has left this file.
            part.unlink(missing_ok=True)
        self._claim = Claim(
            epoch=last.epoch + 1 if last else 1,
            token=last.token if last else make_token(),
            port=last.port if last else 0,
            owner=secrets.token_hex(8),
        )
        self._write_claim(self._claim)
        return self._claim

    def record_port(self, port: int) -> None:
        """Record the port on which this coordinator listens."""
        assert self._claim is not None
        self._claim = replace(self._claim, port=port)
        self._write_claim(self._claim)

    def save(self, state: TrainingState) -> None:
        """Replace the state atomically. Raises Superseded if another coordinator has claimed the training."""
        self._raise_if_superseded()
        with _replacing(self.path) as file:
            torch.save(state, file)
            # Check again, because writing takes long, and another coordinator may have claimed the training meanwhile.
            self._raise_if_superseded()

    def load(self) -> TrainingState | None:
        """Return the last state, or None if there is none. Raises ShadhoError if it cannot be read."""
        if not self.path.exists():
            return None
        try:
            state: TrainingState = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ShadhoError(
                f"the checkpoint {self.path} cannot be read ({error}); remove it to start from the first step"
            ) from error
        return state

    def remove(self) -> None:
        """Remove the files of a finished training, unless another coordinator has claimed it."""
        if self._read_claim() == self._claim:
            for path in (self.path, self._claims):
                path.unlink(missing_ok=True)

    def _raise_if_superseded(self) -> None:
        # If there is no claim at all, the coordinator that took over has finished.
        last = self._read_claim()
        if self._claim is None or last is None or last.owner != self._claim.owner:
            raise Superseded

    def _read_claim(self) -> Claim | None:
        try:
            return msgspec.convert(json.loads(self._claims.read_text()), Claim)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ShadhoError(
                f"{self._claims} cannot be read ({error}); remove it to start from the beginning"
            ) from error

    def _write_claim(self, claim: Claim) -> None:
        with _replacing(self._claims) as file:
            file.write(json.dumps(msgspec.structs.asdict(claim)).encode())


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """Yield a new file. It replaces `target` at the end of the `with` block, unless the block raises an error."""
    try:
        # Only its owner may read it, because the claim contains the token.
        with replacing(target, mode=0o600) as file:
            yield file
    except FileNotFoundError:
        if not target.parent.exists():
            raise
        # The claim of another coordinator has removed the new file.
        raise Superseded from None
