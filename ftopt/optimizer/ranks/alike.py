"""What the ranks of an island must give alike before they start; and what a rank tells the others of an error."""

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
    """UserError: a rank has another method, or other settings of it, than rank 0. ``each``: of each rank."""
    for rank, found in enumerate(each):
        names = sorted(name for name in found.keys() | each[0].keys() if found.get(name) != each[0].get(name))
        if names:
            first = names[0]
            raise UserError(
                f"the ranks of this replica differ in their method: {first} is {found.get(first)} on rank {rank}, and "
                f"{each[0].get(first)} on rank 0; give all ranks the same method"
            )


def check_resumed(each: Sequence[object]) -> None:
    """UserError: a rank resumes from another checkpoint than rank 0. ``each``: its versions; None: it resumes none."""
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
    """What the ranks go on from, where each has looked for the newest checkpoint itself. ``each``: its versions.

    Raises:
        UserError: they have not found the same, or one of them has found none that it can read.
        FtoptError: one of them has failed.
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
    """What the other ranks are told of an error that is this rank's alone."""
    return plain(error) if isinstance(error, FtoptError) else f"{type(error).__name__}: {plain(error)}"
