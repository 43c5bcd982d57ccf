"""Addresses: a coordinator's, and those of this machine's network interfaces by name (Linux)."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

from ftopt.errors import UserError

_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR
_UP = 1
_GLOBAL = "00"
_IPV6 = Path("/proc/net/if_inet6")


def address_of(interface: str) -> str:
    """The address of a network interface: its IPv4 address, else its global IPv6 address. UserError: no interface has
    that name, it is down, or it has no address. The message names the usable ones."""
    try:
        there = {name: _address(name) if _is_up(name) else "" for _, name in socket.if_nameindex()}
    except (ImportError, AttributeError, OSError) as error:
        raise UserError(
            f"interface={interface!r:.60}: interfaces cannot be looked up on this machine ({error}); give host=, or "
            "set FTOPT_HOST, to its address"
        ) from None
    if found := there.get(interface):
        return found
    wrong = {"": "it is down", None: "it has no address"}
    reason = wrong[there[interface]] if interface in there else "there is none of that name"
    usable = ", ".join(f"{name} ({address})" for name, address in there.items() if address)
    raise UserError(f"interface={interface!r:.60}: {reason}; this machine has {usable or 'none that can be used'}")


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None: no interface has it, or it cannot be determined."""
    try:
        return next((name for _, name in socket.if_nameindex() if _address(name) == address), None)
    except (ImportError, AttributeError, OSError):
        return None


def _is_up(name: str) -> bool:
    (flags,) = struct.unpack_from("<H", _ask(name, _GET_FLAGS), 16)
    return bool(flags & _UP)


def _address(name: str) -> str | None:
    try:
        return socket.inet_ntoa(_ask(name, _GET_ADDRESS)[20:24])
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise
    if not _IPV6.exists():
        return None
    rows = (line.split() for line in _IPV6.read_text(encoding="ascii").splitlines())
    return next(
        (str(ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in rows if row[5] == name and row[3] == _GLOBAL),
        None,
    )


def _ask(name: str, what: int) -> bytes:
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return ioctl(any_socket, what, struct.pack("256s", name.encode()[:15]))


def host_in(url: str) -> str | None:
    """The host that ``url`` names; None: it is not ``http://HOST:PORT`` or ``https://HOST:PORT``."""
    try:
        parts = urlsplit(url)
        return parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:  # a port out of range, an unclosed bracket
        return None
