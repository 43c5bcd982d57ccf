"""Options for token and TLS that several verbs share."""

from __future__ import annotations

import argparse

from ftopt.common.paths import user_path
from ftopt.errors import UserError
from ftopt.net.tls import Tls, find_tls
from ftopt.net.token import find_token


def add_file(parser: argparse.ArgumentParser, option: str, text: str) -> None:
    parser.add_argument(option, type=user_path, metavar="FILE", help=text)


def add_token(parser: argparse.ArgumentParser) -> None:
    add_file(parser, "--token-file", "file whose first line is the job's token (default: FTOPT_TOKEN, else none)")
    parser.add_argument("--token", help=argparse.SUPPRESS)


def add_certificate(parser: argparse.ArgumentParser) -> None:
    add_file(parser, "--cert", "certificate to serve with, PEM (default: FTOPT_CERT)")
    add_file(parser, "--key", "private key of the certificate, PEM (default: FTOPT_KEY)")


def add_ca(parser: argparse.ArgumentParser) -> None:
    add_file(parser, "--ca", "CA certificates to trust, PEM (default: FTOPT_CA, else the system's)")


def token_of(arguments: argparse.Namespace) -> str | None:
    """Returns the token that the user has given; raises `UserError` for ``--token`` or an unusable token."""
    if arguments.token is not None:
        raise UserError(
            "--token is not allowed: every user of this machine can read the command lines of all processes; put the "
            "token into a file and give --token-file FILE, or set FTOPT_TOKEN"
        )
    return find_token(file=arguments.token_file)


def tls_of(arguments: argparse.Namespace) -> Tls:
    """Returns the certificate, key and CA files that the user has given."""
    given = vars(arguments)
    return find_tls(given.get("cert"), given.get("key"), given.get("ca"))
