"""The errors that users of ftopt see. Each message says what is wrong, what it got, what is allowed, and what to do."""

from __future__ import annotations


class FtoptError(Exception):
    """The base of ftopt's own errors."""


class UserError(FtoptError, ValueError):
    """The user's input is wrong: a recipe, an argument, a file. The command line exits with status 2."""


class Refused(UserError):
    """The coordinator refuses this replica (another model, method, settings or protocol). The job goes on."""


class Unreachable(UserError, ConnectionError):
    """Nothing answers at the address of the coordinator, or of a peer."""
