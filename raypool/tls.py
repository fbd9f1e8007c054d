"""The certificates by which two machines know each other."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from raypool.errors import InvalidTypeError


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The certificates of a cluster whose connections are encrypted: each side shows one, and checks the other's.

    Args:
        certificate: The file with this machine's certificate, PEM.
        key: The file with the private key that belongs to it.
        authority: The file with the certificate of the authority that has signed those of all machines.

    Raises:
        InvalidTypeError: One of them is not the path of a file.

    Source:
        Ray, TLS Authentication: RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT.

    Example:
        >>> Tls(certificate="tls/laptop.crt", key="tls/laptop.key", authority="tls/ca.crt").authority
        'tls/ca.crt'
    """

    certificate: str | PathLike[str]
    key: str | PathLike[str]
    authority: str | PathLike[str]

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):
            if not isinstance(getattr(self, name), (str, PathLike)):
                raise InvalidTypeError(f"{name}={getattr(self, name)!r} is not the path of a file.")
