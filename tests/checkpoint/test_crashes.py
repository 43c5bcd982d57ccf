"""A crash at any moment of writing leaves a checkpoint that was whole before, or the new one."""

from __future__ import annotations

import random
from pathlib import Path

from ftopt.checkpoint.manifest import BadCheckpoint
from ftopt.checkpoint.reader import verified
from ftopt.errors import UserError
from tests.checkpoint.parts import Folder, Recorded, mixture, part, put, writer

SEED = 20261121


def history(tmp_path: Path, *, without: str = "") -> tuple[Recorded, list[int]]:
    """Two checkpoints of two replicas and two fragments, one kept; the images, and when each was whole."""
    root = tmp_path / "disk"
    root.mkdir()
    disk = Recorded(root, without=without)
    whole = []
    for version in (5, 10):
        for replica in ("r0", "r1"):
            one, told = writer(root / "a" / "b", keep=1, disk=disk)
            one.write(part(replica, version=version, members=2, fragments=2))
            assert not told.reasons()
        assert told.names() == ["checkpoint"]
        whole.append(len(disk.images) - 1)
    return disk, whole


def wrong_images(disk: Recorded, whole: list[int], tmp_path: Path) -> list[str]:
    """What is wrong after a crash at any of its moments."""
    chance, wrong, known = random.Random(SEED), list[str](), set[tuple[str, int]]()
    for moment, (seen, safe) in enumerate(disk.images):
        images: list[Folder] = [seen, safe, *(mixture(seen, safe, chance) for _ in range(2))]
        least = max((5 * (index + 1) for index, at in enumerate(whole) if moment >= at), default=0)
        for number, image in enumerate(images):
            if (repr(image), least) in known:
                continue
            known.add((repr(image), least))
            path = tmp_path / f"{moment}-{number}"
            put(image, path)
            try:
                found = verified(path / "a" / "b")
                assert {float(v.tensors["anchor"][0]) for v in found.newest} == {found.manifest.version}
                assert found.own("r1")["moments"][0] == found.manifest.version
                got = found.manifest.version
            except BadCheckpoint as error:
                wrong.append(f"moment {moment}, image {number}: {error}")
                continue
            except UserError:
                got = 0  # none is whole
            if got < least:
                wrong.append(f"moment {moment}, image {number}: version {got}, {least} was whole")
    return wrong


def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    disk, whole = history(tmp_path)
    assert len(disk.images) > 70
    assert wrong_images(disk, whole, tmp_path) == []


def test_without_syncing_folders_a_loss_of_power_is_found_out(tmp_path: Path) -> None:
    disk, whole = history(tmp_path, without="sync_folder")
    assert any("was whole" in text for text in wrong_images(disk, whole, tmp_path))
