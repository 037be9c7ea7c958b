"""Files of the pages, served from memory: each is compressed once, and sent again only if it has changed."""

from __future__ import annotations

import gzip
import hashlib
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

#: types of the files by their suffix; other files are not served
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}


class Asset:
    """One file with what is sent of it."""

    def __init__(self, path: Path) -> None:
        self._kind, self._body = TYPES[path.suffix], path.read_bytes()
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        """Return the file, or that the browser has it already."""
        # A browser asks again each time, which costs little, so that a new version is never mixed with an old one.
        headers = {"cache-control": "no-cache", "etag": self._tag, "vary": "accept-encoding"}
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self._body, headers=headers, media_type=self._kind)
        return Response(self._compressed, headers={**headers, "content-encoding": "gzip"}, media_type=self._kind)

    @cached_property
    def _compressed(self) -> bytes:
        return gzip.compress(self._body, mtime=0)


class Assets:
    """The files below a folder."""

    def __init__(self, folder: Path) -> None:
        found = (path for path in folder.rglob("*") if path.suffix in TYPES)
        self._assets = {path.relative_to(folder).as_posix(): Asset(path) for path in found}

    async def answer(self, request: Request) -> Response:
        """Return the file whose path is in the request's path."""
        asset = self._assets.get(request.path_params.get("path", "index.html"))
        return PlainTextResponse("there is no such file\n", 404) if asset is None else asset.answer(request)
