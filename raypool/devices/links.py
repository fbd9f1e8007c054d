"""Which network interfaces of this machine are fast."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

FAST_LINKS = "RAYPOOL_FAST_MULTINODE"
"""Environment variable of workers that are to prefer fast links."""

INTERFACES = "NCCL_SOCKET_IFNAME"
"""Environment variable that tells NCCL which interfaces to use."""


def infiniband_interfaces() -> list[str]:
    """Return the IP interfaces over InfiniBand that are up and have an IPv4 address: ib0, ibp1s0 and the like."""
    import psutil

    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    return [
        name
        for name in sorted(addresses)
        if name.startswith("ib")
        and name in states
        and states[name].isup
        and any(entry.family == socket.AF_INET for entry in addresses[name])
    ]


def prefer_fast_links(environ: MutableMapping[str, str]) -> None:
    """Name the fast interfaces to NCCL, if that is wanted, and nobody has named others.

    By itself NCCL would choose such an interface too; but whoever starts ranks (raypool, for one) names it the one by which
    rank 0 is reached, which may be a slow one.

    Source:
        NVIDIA NCCL, Environment Variables: NCCL_SOCKET_IFNAME, where "=" before a name means this very interface.
    """
    if environ.get(FAST_LINKS) != "1" or INTERFACES in environ:
        return
    names = infiniband_interfaces()
    if names:
        environ[INTERFACES] = "=" + ",".join(names)
