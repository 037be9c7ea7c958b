"""Connections between the processes of a trial on several machines: addresses, listening sockets, a shared token."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from contextlib import closing, suppress

from shadho_celery.errors import UsageError

#: environment variable with the address by which other machines reach this machine, if it is not detected correctly,
#: as in containers that share a host name
HOST_VARIABLE = "SHADHO_HOST"
#: environment variable with the address on which gangs listen, if it differs from the address that other machines use,
#: as behind a NAT; 0.0.0.0 for all
LISTEN_VARIABLE = "SHADHO_LISTEN"
LOOPBACK = "127.0.0.1"
#: an address that no machine has (TEST-NET-1 of RFC 5737), to find the route to other machines
_OUTSIDE = "192.0.2.1"

#: format of HOST:PORT in announcements; an IPv6 address is in brackets
PLACE = r"^(\[[0-9A-Fa-f:.]{1,100}\]|[0-9A-Za-z._-]{1,255}):[0-9]{1,5}\Z"

#: maximum number of connections that wait to be accepted
_BACKLOG = 64
#: remedy if this machine cannot listen on the address by which other machines reach it
_REMEDY = f"set {LISTEN_VARIABLE} to an address of this machine, or to 0.0.0.0 for all of them"


def make_token() -> str:
    """Return a new random token, by which the processes of a trial recognise one another."""
    return secrets.token_hex(32)


def own_address(peer: str = _OUTSIDE, port: int = 9) -> str:
    """Return the address by which other machines reach this one: SHADHO_HOST, else the local address of the route to
    `peer`.

    Without a route, it is 127.0.0.1.
    """
    if told := os.environ.get(HOST_VARIABLE):
        return told
    with suppress(OSError):
        family, kind, *_, where = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as probe:
            # This only looks up the route: a datagram socket sends nothing when it is connected.
            probe.connect(where)
            return str(probe.getsockname()[0])
    return LOOPBACK


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    return host.startswith("127.") or host in {"localhost", "::1"}


def listen(host: str, port: int = 0, *, for_others: bool = False) -> socket.socket:
    """Return a listening socket. Port 0 means any free port.

    If `for_others`, `host` is the address by which other machines reach this one, and SHADHO_LISTEN may replace it.
    Raises UsageError if the address cannot be used.
    """
    if for_others:
        host = _listening_address(host)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        is_in_use = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "give another port" if is_in_use else _REMEDY
        # Python appends the address, which the message already has.
        reason = str(error.strerror).partition(" (while")[0]
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; {remedy}") from error


def _listening_address(host: str) -> str:
    if told := os.environ.get(LISTEN_VARIABLE):
        return told
    with suppress(OSError):
        if host != "localhost" and not host.startswith("127.") and socket.gethostbyname(host).startswith("127."):
            # Debian's /etc/hosts has such an entry for the machine's own name.
            raise UsageError(
                f"other machines cannot reach this one as {host}, which is a loopback address here; {_REMEDY}"
            )
    return host


def close_socket(server: socket.socket) -> None:
    """Close a listening socket. A thread that is blocked in its `accept` gets an error."""
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def interface_variables(host: str) -> dict[str, str]:
    """Return the environment variables that make gloo use the network interface of an address.

    By default gloo uses the address of the machine's own name, which may be a loopback address. If the address itself
    is a loopback address, all ranks are on this machine, so gloo and NCCL must use the loopback interface, even if the
    environment names another one. Otherwise a GLOO_SOCKET_IFNAME in the environment is respected: the result is then
    {}. It is also {} for an address without an interface.
    """
    is_local = host.startswith("127.")
    interface = interface_of(host) if is_local or "GLOO_SOCKET_IFNAME" not in os.environ else None
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if is_local else [])]
    return {} if interface is None else dict.fromkeys(names, interface)


def interface_of(host: str) -> str | None:
    """Return the name of the network interface with this address, or None if there is none."""
    import psutil

    with suppress(OSError):
        address = socket.gethostbyname(host)
        if address.startswith("127."):
            # The loopback interface has all addresses that begin with 127., but lists only 127.0.0.1.
            address = LOOPBACK
        for name, own in psutil.net_if_addrs().items():
            if address in [each.address for each in own]:
                return str(name)
    return None
