"""Access to the dashboard: login by a token or a code, sessions by a cookie, and checks against requests of other
sites.

Other users of a login node can reach its loopback address, so a login is always required. The printed URL has a code
after ``#``, because browsers do not send this part of a URL to servers or proxies. The page exchanges the code for a
cookie. A code works once. Source of the checks of Host and Origin: OWASP Cheat Sheet Series, "Cross-Site Request
Forgery Prevention", 2024.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import unquote_plus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shadho_celery.core.files import read_text
from shadho_celery.errors import UsageError

#: number of random bytes in a token, a code or a session
RANDOM_BYTES = 24
#: maximum number of browsers that are logged in; if there are more, the browser that logged in first must do so again
MOST_SESSIONS = 100
#: maximum length of a request's URL and of its body, in bytes
MOST_URL, MOST_BODY = 4096, 1_000_000
#: host names that requests may use: the names of the loopback address
HOSTS = {"127.0.0.1", "localhost", "[::1]"}
#: beginning of the cookie's name
COOKIE = "shadho_celery_"
_TOO_LARGE = f"send at most {MOST_BODY} bytes"
#: names that a URL's query must not have
_SECRETS = {"token", "access_token", "authorization", "code", "key", "password"}
#: beginnings of the paths that need no session, besides the page itself
_FREE = ("/static/", "/pages/", "/login")

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    # "no-cache" means that a browser may keep a file, but must check each time whether its copy is current.
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Access:
    """The secrets of a dashboard: its token, its login code, and the sessions of browsers."""

    def __init__(self, token: str | None = None) -> None:
        """Use `token`, by default a random one."""
        self._token = token or secrets.token_urlsafe(RANDOM_BYTES)
        self._codes: set[str] = set()
        #: sessions as keys, the oldest first
        self._sessions: dict[str, None] = {}

    def new_code(self) -> str:
        """Return a new code, which logs in one browser once. An earlier code that was not used becomes invalid."""
        code = secrets.token_urlsafe(RANDOM_BYTES)
        self._codes = {code}
        return code

    @property
    def has_code(self) -> bool:
        """True if there is a code that was not used yet."""
        return bool(self._codes)

    def log_in(self, secret: str) -> str | None:
        """Return a new session if `secret` is the code or the token, else None."""
        is_code = _is_one_of(secret, self._codes)
        if not is_code and not _is_one_of(secret, [self._token]):
            return None
        if is_code:
            self._codes.clear()
        session = secrets.token_urlsafe(RANDOM_BYTES)
        self._sessions[session] = None
        while len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session

    def knows(self, session: str) -> bool:
        """Return whether this is the session of a browser that is logged in."""
        return _is_one_of(session, self._sessions)

    def is_secret(self, text: str) -> bool:
        """Return whether a text is the token or the unused code."""
        # Shorter texts cannot be a secret. They are not compared, because a URL may have many.
        return len(text) >= RANDOM_BYTES and _is_one_of(text, [self._token, *self._codes])


def _is_one_of(secret: str, known: Iterable[str]) -> bool:
    """Return whether `secret` is one of `known`.

    The comparison takes constant time, so that the time of an answer does not reveal a secret.
    """
    given = secret.encode("utf-8", "replace")
    # A list is used, because with a generator, `any` would stop at the first match.
    return any([hmac.compare_digest(given, each.encode()) for each in known])  # noqa: C419


def read_token(path: Path) -> str:
    """Return the token in a file. If the file does not exist, create it with a new token, readable only by its owner.

    Raises UsageError if the file cannot be used, or if others may read it.
    """
    try:
        with suppress(FileExistsError), open(path, "x", opener=partial(os.open, mode=0o600)) as file:
            file.write(secrets.token_urlsafe(RANDOM_BYTES) + "\n")
    except OSError as error:
        raise UsageError(f"--token-file: {path} cannot be written: {error.strerror}") from None
    token = read_text(path, f"--token-file {path}", is_secret=True).strip()
    if len(token) < RANDOM_BYTES:
        raise UsageError(f"--token-file: {path} has fewer than {RANDOM_BYTES} characters; remove it to get a new token")
    return token


class Guard:
    """ASGI middleware that refuses requests that no page of this dashboard has sent, and adds security headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Headers that the route has set itself are kept.
                own = {name for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        if refused is not None:
            status, reason = refused
            await PlainTextResponse(reason + "\n", status)(scope, receive, guarded)
            return
        await self._app(scope, _limited(receive), guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason if a request is refused, else None."""
        headers, path = Headers(scope=scope), scope["path"]
        found = (
            _size_refusal(scope, headers)
            or self._secret_refusal(scope["query_string"].decode("latin-1"))
            or _origin_refusal(scope["method"], path, headers)
        )
        if found or path == "/" or path.startswith(_FREE) or self._access.knows(session_of(headers)):
            return found
        return 401, "not logged in: open the URL that was printed, or restart the dashboard for a new one"

    def _secret_refusal(self, query: str) -> tuple[int, str] | None:
        """Return the status and the reason if a URL's query has a secret, by its name or its value, else None."""
        # Some programs separate parameters with semicolons. A secret may be a word of a value, as in ``Bearer TOKEN``.
        parts = [unquote_plus(part).partition("=") for part in re.split("[&;]", query)]
        if any(name.lower() in _SECRETS for name, _, _ in parts) or any(
            self._access.is_secret(text)
            for name, _, value in parts
            for text in (name, value, *re.split(r"[\s:,]+", value))
        ):
            return 400, "a secret in a URL's query is refused: it would stay in logs; open the URL that was printed"
        return None


def _size_refusal(scope: Scope, headers: Headers) -> tuple[int, str] | None:
    if len(scope["path"]) + len(scope["query_string"]) > MOST_URL:
        return 414, "this URL is too long"
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BODY:
        return 413, _TOO_LARGE
    return None


def _origin_refusal(method: str, path: str, headers: Headers) -> tuple[int, str] | None:
    """Return the status and the reason if a request does not come from a page of this dashboard, else None."""
    # The port is ignored, because a tunnel may change it. A page of another site has another host name.
    host = headers.get("host", "").lower()
    if re.sub(r":\d+\Z", "", host) not in HOSTS:
        return 421, "this dashboard has another address; open the URL that was printed"
    is_own = headers.get("sec-fetch-site", "same-origin") in {"same-origin", "none"}
    if method in {"GET", "HEAD"}:
        # Links of other pages to this page are allowed, as in the terminal of a notebook: the page contains no data.
        is_link = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        return None if is_own or is_link else (403, "another page has made this request")
    if not is_own or headers.get("origin", "").lower() != f"http://{host}":
        return 403, "another page has made this request"
    return None if headers.get("content-type", "").partition(";")[0] == "application/json" else (415, "send JSON")


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session in a request's cookie, or ""."""
    name = cookie_name(headers)
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def cookie_name(headers: Mapping[str, str]) -> str:
    """Return the name of the cookie. It contains the port, because servers on all ports of a host share cookies."""
    return COOKIE + headers.get("host", "").rpartition(":")[2]


def _limited(receive: Receive) -> Receive:
    """Return a `receive` that refuses a body of more than MOST_BODY bytes, also if there is no content-length."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MOST_BODY:
            # The route is waiting for the body, so Starlette catches this error and answers with it.
            raise HTTPException(413, _TOO_LARGE)
        return message

    return limited
