"""Several replicas write one checkpoint; what goes wrong stops no training."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ftopt.checkpoint.manifest import NAME
from ftopt.checkpoint.reader import find, verified, whole
from tests.checkpoint.parts import FullDisk, part, writer


def test_it_is_whole_when_every_member_has_written(tmp_path: Path) -> None:
    for index, replica in enumerate(("r2", "r0", "r1")):
        one, told = writer(tmp_path)
        one.write(part(replica, members=3, fragments=2))
        assert bool(whole(tmp_path)) == (index == 2)
        assert told.names() == (["checkpoint"] if index == 2 else [])
    found = verified(tmp_path)
    assert found.replicas == ["r0", "r1", "r2"]
    assert [v.record["fragment"] for v in found.newest] == [0, 1]
    names = {path.name for path in found.path.iterdir()}
    assert names == found.manifest.files.keys() | {NAME}
    assert sum(name.startswith("committed") for name in names) == 2


def test_all_at_once_make_one_whole_checkpoint(tmp_path: Path) -> None:
    """Each shard is written by one of them, and the last one sees all the others."""
    for version in range(5, 105, 5):
        parts = [part(f"r{i}", version=version, members=6, fragments=3) for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            tolds = list(pool.map(lambda p: _write(tmp_path, p), parts))
        assert not [reason for told in tolds for reason in told.reasons()]
        assert find(tmp_path).manifest.version == version
        assert len(whole(tmp_path)) == min(2, version // 5)


def _write(folder: Path, each: object) -> object:
    one, told = writer(folder)
    one.write(each)  # type: ignore[arg-type]
    return told


def test_a_death_before_the_last_part_leaves_the_one_before(tmp_path: Path) -> None:
    one, _ = writer(tmp_path)
    one.write(part("r0", version=5))
    one.write(part("r0", version=10, members=2))
    assert find(tmp_path).manifest.version == 5
    one.write(part("r0", version=15))
    assert [path.name[:9] for path in sorted(tmp_path.iterdir())] == ["v00000005", "v00000015"]


def test_so_many_are_kept(tmp_path: Path) -> None:
    one, _ = writer(tmp_path, keep=3)
    for version in range(1, 9):
        one.write(part(version=version))
    assert [path.name[:9] for path in whole(tmp_path)] == ["v00000006", "v00000007", "v00000008"]


def test_after_the_job_has_gone_back_the_one_that_had_come_furthest_is_kept_until_it_is_passed(tmp_path: Path) -> None:
    one, _ = writer(tmp_path, keep=2)
    made = [(1, 1001), (2, 1002), (3, 1003), (2, 2001), (3, 2002), (4, 2003)]
    kept = []
    for version, attempt in made:
        one.write(part(version=version, attempt=attempt))
        kept.append([path.name for path in whole(tmp_path)])
    names = [f"v{version:08d}-{attempt}" for version, attempt in made]
    assert kept[3:] == [[names[2], names[3]], [names[2], names[3], names[4]], [names[4], names[5]]]
    assert find(tmp_path).manifest.version == 4


def test_what_several_have_agreed_on_is_not_removed_for_what_one_has_made_alone(tmp_path: Path) -> None:
    """Of two final versions the later one may be a slow replica's."""
    one, _ = writer(tmp_path, keep=2)
    kept = []
    for version, replicas in enumerate((2, 2, 2, 1, 1, 1, 1, 2, 2, 2), start=1):
        for replica in range(replicas):
            one.write(part(f"r{replica}", version=version, members=replicas))
        kept.append([int(path.name[1:9]) for path in whole(tmp_path)])
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7], [7, 8], [8, 9], [9, 10]]


def test_parts_that_do_not_fit_together_make_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """r1 counts r0's step 20, and r0 was saved without it."""
    one, told = writer(tmp_path)
    one.write(part("r0", members=2, counted=(("r0", 1, 10), ("r1", 1, 10))))
    behind = part("r1", members=2, version=6, attempt=1005, counted=(("r0", 1, 20), ("r1", 1, 10)))
    one.write(_at(behind, 5))
    assert whole(tmp_path) == []
    assert "counts the steps of r0 up to 20" in told.reasons()[0]


def test_a_newer_version_fits_who_offers_what_it_counts(tmp_path: Path) -> None:
    """r0 was saved with the contribution under way that r1 has seen counted."""
    one, told = writer(tmp_path)
    one.write(part("r0", members=2, counted=(("r0", 1, 10), ("r1", 1, 10)), offered=20))
    one.write(_at(part("r1", members=2, version=6, attempt=1005, counted=(("r0", 1, 20), ("r1", 1, 10))), 5))
    assert told.names() == ["checkpoint"]
    found = verified(tmp_path)
    assert [v.record["version"] for v in found.newest] == [6]
    assert [v.record["version"] for v in found.committed("r0")] == [5]


def _at(each: object, version: int) -> object:
    """The same part in the checkpoint of another version."""
    from dataclasses import replace

    return replace(each, version=version)  # type: ignore[type-var]


@pytest.mark.parametrize("room", [0, 100, 500, 1000, 1500, 2000])
def test_a_full_disk_is_told_the_first_second_and_fourth_time_and_the_one_before_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    writer(tmp_path)[0].write(part(version=5))
    one, told = writer(tmp_path, disk=FullDisk(room))
    with caplog.at_level(logging.WARNING):
        for version in (10, 15, 20):
            one.write(part(version=version))
    assert told.names() == ["checkpoint_failed"] * 3
    (stands,) = [path for path in tmp_path.iterdir() if path.name.startswith("v00000005")]
    goes_on = f"training goes on, and the newest complete checkpoint is {stands}"
    assert [record.getMessage() for record in caplog.records] == [
        f"no checkpoint v00000010-1010: {told.reasons()[0]}; {goes_on}",
        f"no checkpoint v00000015-1015 (2 have failed in a row): {told.reasons()[1]}; {goes_on}",
    ]
    assert one.lacks == ("v00000020-1020", told.reasons()[2])
    assert "No space left on device" in told.reasons()[0]
    assert verified(tmp_path).manifest.version == 5
    only_the_manifest_failed = ["v00000010"] if room == 2000 else []
    assert sorted(path.name[:9] for path in tmp_path.iterdir()) == ["v00000005", *only_the_manifest_failed, "v00000020"]
    assert not list(tmp_path.glob("v00000020*/*"))


def test_the_others_parts_of_what_one_could_not_write_do_not_take_the_next_one_s_room(tmp_path: Path) -> None:
    """There is room for one part less than two checkpoints have."""
    (full, told), (other, _) = writer(tmp_path, disk=FullDisk(0)), writer(tmp_path)
    for version in (5, 10):
        other.write(part("r1", version=version, members=2))
        full.write(part("r0", version=version, members=2))
    assert told.names() == ["checkpoint_failed"] * 2
    assert not list(tmp_path.glob("v00000005*"))
    assert [path.name for path in tmp_path.glob("v00000010*/*.json")] == ["replica-r1.json"]


@pytest.mark.parametrize("room", range(0, 3600, 200))
def test_after_a_full_disk_the_next_one_is_written(tmp_path: Path, room: int) -> None:
    """Wherever the disk became full: in the files of either replica, in their notes, in the manifest."""
    disk = FullDisk(room)
    (one, _), (other, _) = writer(tmp_path, keep=1, disk=disk), writer(tmp_path, keep=1, disk=disk)
    for version in (5, 10):
        one.write(part("r0", version=version, members=2))
        other.write(part("r1", version=version, members=2))
        assert [path.name[:9] for path in whole(tmp_path)] == (["v00000010"] if version == 10 else [])
        disk.room = 1 << 20
    assert [path.name[:9] for path in tmp_path.iterdir()] == ["v00000010"]
    assert verified(tmp_path).replicas == ["r0", "r1"]


def test_a_real_limit_of_a_files_size_is_a_full_disk(tmp_path: Path) -> None:
    writer(tmp_path)[0].write(part(version=5))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
        one, told = writer(tmp_path)
        one.write(part(version=10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    file = tmp_path / "v00000010-1010" / "committed-0-v10.safetensors"
    assert told.reasons() == [f"[Errno 27] File too large: '{file}'"]
    assert verified(tmp_path).manifest.version == 5


def test_what_no_checkpoint_can_hold_stops_nothing(tmp_path: Path) -> None:
    one, told = writer(tmp_path)
    one.write(part(own={"loader": {"state": object()}}))
    assert told.reasons() == [
        "loader.state is a object, which a checkpoint cannot hold; allowed: numbers, strings, bytes, None, dates, "
        "paths, enums, tensors, NumPy arrays and numbers, and lists, tuples, sets, dicts, named tuples and dataclasses "
        "of them"
    ]


def test_it_writes_beside_the_caller_and_never_two_at_once(tmp_path: Path) -> None:
    class Slow(FullDisk):
        def __init__(self) -> None:
            super().__init__(1 << 20)
            self.read, self.write_end = os.pipe()

        def claim(self, path: Path) -> bool:
            os.read(self.read, 1)
            return super().claim(path)

    disk = Slow()
    one, told = writer(tmp_path, disk=disk)
    one.begin(part(version=5))
    assert not one.idle(10, 1010)
    assert "still being written" in told.reasons()[0]
    os.write(disk.write_end, b"x")
    assert one.wait(30) and find(tmp_path).manifest.version == 5
    os.write(disk.write_end, b"x")
    assert one.idle(15, 1015)
    one.begin(part(version=15))
    one.close(30)
    assert find(tmp_path).manifest.version == 15
    os.close(disk.read), os.close(disk.write_end)


def test_who_comes_late_changes_no_shard_of_a_whole_one(tmp_path: Path) -> None:
    """A replica that was in no quorum of it, and is of another history."""
    writer(tmp_path)[0].write(part("r0"))
    shard = find(tmp_path).path / "committed-0-v5.safetensors"
    before = shard.read_bytes()
    late = part("r1")
    late.committed[0].tensors["anchor"].fill_(-1)  # type: ignore[attr-defined]
    writer(tmp_path)[0].write(late)
    assert shard.read_bytes() == before
    assert verified(tmp_path).replicas == ["r0", "r1"]
    assert not list(shard.parent.glob(".*"))


def test_claims_that_a_dead_process_has_left_do_no_harm(tmp_path: Path) -> None:
    class Dies(FullDisk):
        def remove(self, path: Path) -> None:
            if path.name.endswith(".claim"):
                raise KeyboardInterrupt
            super().remove(path)

    one, _ = writer(tmp_path, disk=Dies(1 << 20))
    with pytest.raises(KeyboardInterrupt):
        one.write(part())
    assert list(verified(tmp_path).path.glob(".*.claim"))
    for version in (10, 15):
        writer(tmp_path)[0].write(part(version=version))
    assert [path.name[:9] for path in whole(tmp_path)] == ["v00000010", "v00000015"]
    assert not list(tmp_path.rglob(".*"))


def test_names_of_replicas_may_be_anything(tmp_path: Path) -> None:
    chance = random.Random(3)
    names = ["../r0", "r 1", "日本" * 60, "".join(chr(chance.randint(33, 0x2FFF)) for _ in range(128)), "a" * 128]
    for name in names:
        writer(tmp_path)[0].write(part(name, members=len(names)))
    found = verified(tmp_path)
    assert found.replicas == sorted(names)
    assert [found.own(name)["of"] for name in found.replicas] == sorted(names)
