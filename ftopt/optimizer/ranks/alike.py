"""Checks that an island's ranks agree before they start; and the text of a rank's error for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftopt.errors import FtoptError, UserError, plain


@dataclass(frozen=True)
class Failed:
    """A rank's error. ``users``: it is a `UserError`."""

    reason: str
    users: bool


def check_settings(each: Sequence[Mapping[str, str]]) -> None:
    """Raises UserError if a rank's method or its settings differ from rank 0's. ``each``: those of each rank."""
    for rank, found in enumerate(each):
        names = sorted(name for name in found.keys() | each[0].keys() if found.get(name) != each[0].get(name))
        if names:
            first = names[0]
            raise UserError(
                f"the ranks of this replica differ in their method: {first} is {found.get(first)} on rank {rank}, and "
                f"{each[0].get(first)} on rank 0; give all ranks the same method"
            )


def check_resumed(each: Sequence[object]) -> None:
    """Raises UserError if a rank resumes from a different checkpoint than rank 0. ``each``: its versions; None: it does
    not resume."""
    for rank, found in enumerate(each):
        if found != each[0]:
            have = "resumes no checkpoint" if found is None else "resumes a checkpoint"
            other = "none" if each[0] is None else "another one" if found is not None else "one"
            raise UserError(
                f"rank {rank} of this replica {have}, and rank 0 {other}; call checkpoints.resume() on all ranks, with "
                "a folder that all of them see, and name the checkpoint where newer ones may be written meanwhile: "
                "checkpoints.resume(path)"
            )


def check_found(each: Sequence[object]) -> None:
    """Checks the newest checkpoints that the ranks have each found for themselves. ``each``: its versions.

    Raises:
        UserError: they have found different ones, or a rank has found none that it can read.
        FtoptError: a rank has failed.
    """
    for rank, found in enumerate(each):
        if isinstance(found, Failed):
            raise (UserError if found.users else FtoptError)(f"rank {rank}: {found.reason}" if rank else found.reason)
    for rank, found in enumerate(each):
        if found != each[0]:
            raise UserError(
                f"rank {rank} of this replica goes on from another checkpoint than rank 0; give Checkpoints a folder "
                "that all ranks see"
            )


def reason_of(error: BaseException) -> str:
    """The reason that other ranks get for an error on this rank alone."""
    return plain(error) if isinstance(error, FtoptError) else f"{type(error).__name__}: {plain(error)}"
