"""At which address and through which network interface a rank is reached by the others."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"

FAR_AWAY = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737). Nothing is sent there; the system just chooses the interface to the outside."""

CONNECT_TIMEOUT_S = 5.0
"""How long to wait for the first rank to take a connection [s]."""


def own_address(is_one_host: bool, towards: tuple[str, int] | None = None) -> str:
    """Return the address at which the other ranks reach this one.

    Args:
        is_one_host: All are on this machine: the loopback will do, and nobody outside can connect.
        towards: The address of another rank; None if not known yet.
    """
    if is_one_host:
        return LOOPBACK
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(towards or FAR_AWAY)  # UDP: no packet is sent
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address, None if none has."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def interfaces_for(address: str) -> dict[str, str]:
    """Return the variables that tell gloo and NCCL which interface to use, except those that the user has set."""
    name = interface_of(address)
    if name is None:
        return {}
    return {variable: name for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if variable not in os.environ}


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a port which the system has chosen."""
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(128)
    return listener


def hold_port(address: str) -> tuple[socket.socket, int]:
    """Find a free port; return a socket that holds it, and its number.

    Until the socket is closed, the system assigns the port to no other socket. Torch can still listen at it, because both set
    SO_REUSEADDR and the holder does not listen.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder, int(holder.getsockname()[1])


def knock(address: tuple[str, int]) -> None:
    """See that somebody listens there. Torch's own store would try for its whole time limit, and cannot be interrupted.

    Raises:
        ConnectionError: Nobody does.
    """
    try:
        socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"Rank 0 cannot be reached at {address[0]}:{address[1]}: {error}.") from error
