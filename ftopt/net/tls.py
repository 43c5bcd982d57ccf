"""TLS with the user's own certificates, for the coordinator and for the state transfer between replicas.

Nothing is generated here: without a certificate there is no TLS, and an invalid certificate is never accepted.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from ftopt.common.paths import user_path
from ftopt.errors import UserError

HANDSHAKE_S = 5.0
"""Seconds after which a client that has not finished the TLS handshake is dropped."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The TLS files of one process.

    Args:
        cert: its certificate (PEM, with the chain up to the CA); None: it serves without TLS.
        key: the certificate's private key (PEM, without a passphrase).
        ca: the only CA certificates that it trusts; None: the system's.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def server(self) -> ssl.SSLContext | None:
        """Returns the context of a server; None without a certificate. UserError: a file cannot be read or used; the
        message says which."""
        if self.cert is None and self.key is None:
            return None
        if self.cert is None or self.key is None:
            got, lacks = ("a certificate", "key") if self.key is None else ("a key", "certificate")
            raise UserError(
                f"TLS needs a certificate and its key, got only {got}; give the {lacks} as well: --cert and --key, "
                "FTOPT_CERT and FTOPT_KEY, or cert= and key="
            )
        for what, path in (("certificate", self.cert), ("key", self.key)):
            _readable(what, path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_passphrase)
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(
                f"certificate {self.cert} with key {self.key}: {reason}; give a PEM certificate and the PEM key that "
                "belongs to it, without a passphrase"
            ) from None
        return context

    def client(self) -> ssl.SSLContext:
        """Returns the context of a client, which checks host names, and certificates up to `ca`. UserError: the CA file
        cannot be read, or holds no certificate."""
        if self.ca is None:
            return ssl.create_default_context()
        _readable("CA", self.ca)
        try:
            return ssl.create_default_context(cafile=str(self.ca))
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise UserError(f"CA file {self.ca}: {reason}; give a file of PEM certificates") from None


def find_tls(cert: str | Path | None = None, key: str | Path | None = None, ca: str | Path | None = None) -> Tls:
    """Returns the files given, else those of ``FTOPT_CERT``, ``FTOPT_KEY`` and ``FTOPT_CA``."""
    if cert is None and key is None:
        cert, key = os.environ.get("FTOPT_CERT") or None, os.environ.get("FTOPT_KEY") or None
    ca = ca or os.environ.get("FTOPT_CA") or None
    cert, key, ca = (None if path is None else user_path(path) for path in (cert, key, ca))
    return Tls(cert=cert, key=key, ca=ca)


def why_not(url: str, error: ssl.SSLError) -> str:
    """Returns the message for a failed TLS handshake with the server at ``url``."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {url} is not accepted: {error.verify_message or error}; it must be valid now, name "
            "the host in this address (subjectAltName), and come from a CA that is trusted here: set FTOPT_CA, or "
            "ca=, to the CA's file"
        )
    return (
        f"the TLS handshake with {url} failed ({error.reason or error}); write http:// for a server without a "
        "certificate"
    )


def is_public(host: str) -> bool:
    """Whether ``host`` (an address, or a name to look up) is publicly reachable."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        return any(ipaddress.ip_address(address.partition("%")[0]).is_global for address in found)
    except (OSError, ValueError):
        return False


def _readable(what: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{what} file {path}: {error.strerror}; give a readable file") from None


def _no_passphrase() -> bytes:
    raise ValueError("the key has a passphrase")
