"""Whatever is in the place of a manifest, the reader says which file is wrong and why, and names the one before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftopt.checkpoint.manifest import NAME, BadCheckpoint, label, order, read_manifest
from ftopt.checkpoint.reader import Checkpoint, find, verified, whole
from ftopt.errors import UserError
from tests.checkpoint.parts import part, writer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=UNCHECKED)


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two whole checkpoints."""
    one, told = writer(tmp_path / "c", keep=5)
    for version in (5, 10):
        one.write(part(version=version))
    assert told.names() == ["checkpoint", "checkpoint"]
    return whole(tmp_path / "c")


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        verified(path)
    return str(caught.value)


@FUZZ
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_refused_with_file_and_reason(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / NAME
    path.write_bytes(raw)
    with pytest.raises(BadCheckpoint) as caught:
        read_manifest(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.long
@FUZZ
@given(data=st.data())
def test_a_manifest_with_anything_changed_is_refused_or_says_the_same(two: list[Path], data: st.DataObject) -> None:
    """One value anywhere in it replaced by any JSON."""
    path = two[1] / NAME
    text = path.read_text()
    manifest = json.loads(text)
    place: Any = manifest
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    before = place[key]
    place[key] = data.draw(JSON)
    try:
        path.write_text(json.dumps(manifest))
        if place[key] == before and type(place[key]) is type(before):
            return
        try:
            found = verified(two[1])
            for replica in found.replicas:
                found.committed(replica), found.own(replica)
            assert key in ("version", "attempt", "inner_step")  # plain numbers, which nothing contradicts
        except BadCheckpoint as bad:
            assert bad.path.parent == two[1]
            assert f"use {two[0]}" in str(bad) or key in ("bytes", "sha256", "files") or bad.reason
    finally:
        path.write_text(text)


def test_the_one_before_is_named(two: list[Path]) -> None:
    (two[1] / NAME).write_text("{")
    assert refused(two[1].parent) == (
        f"{two[1] / NAME}: is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); "
        f"the previous one is sound: use {two[0]}"
    )


@pytest.mark.parametrize("name", ["committed-0-v10.safetensors", "replica-r0.safetensors", "replica-r0.json"])
def test_one_flipped_bit_in_any_file_is_found(two: list[Path], name: str) -> None:
    path = two[1] / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert refused(two[1]).startswith(f"{path}: was changed since it was written")
    assert f"use {two[0]}" in refused(two[1].parent)


def test_a_file_cut_short_or_missing_is_found(two: list[Path]) -> None:
    path = two[1] / "replica-r0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "bytes; " in refused(two[1])
    path.unlink()
    assert refused(two[1]).startswith(f"{path}: cannot be read: No such file or directory")


def test_a_damaged_one_before_is_not_offered(two: list[Path]) -> None:
    (two[0] / "replica-r0.safetensors").unlink()
    (two[1] / NAME).write_text("[]")
    assert "there is no older sound one" in refused(two[1])


def test_a_folder_without_any_says_what_to_give(tmp_path: Path) -> None:
    assert "holds no complete checkpoint; give a run's folder, a folder of checkpoints, or one" in refused(tmp_path)


def test_what_was_never_completed_is_passed_over(two: list[Path]) -> None:
    (two[0].parent / label(15, 2000)).mkdir()
    assert find(two[0].parent).path == two[1]


def test_another_format_is_told(two: list[Path]) -> None:
    path = two[1] / NAME
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert "format 2; this ftopt reads format 1" in refused(two[1])


def test_labels_sort_by_age() -> None:
    """Attempts are numbered through a job's lives: the newer one of a lower version is the newer one."""
    names = [label(15, 1000), label(10, 2000), label(11, 2001)]
    assert sorted(names, key=lambda name: order(name) or (0, 0)) == names
    assert order("manifest.json") is None


def test_a_checkpoint_knows_its_replicas(two: list[Path]) -> None:
    found = Checkpoint(two[1])
    assert found.replicas == ["r0"] and found.manifest.version == 10
    assert float(found.own("r0")["moments"][0]) == 10


@pytest.mark.parametrize("what", ["a part", "the manifest"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(two: list[Path], what: str) -> None:
    """It gives no bytes, and nobody writes into it."""
    newest = two[-1]
    name = NAME if what == "the manifest" else next(iter(read_manifest(newest / NAME).files))
    if what == "a part":
        text = json.loads((newest / NAME).read_text())
        text["files"][name]["bytes"] = 0
        (newest / NAME).write_text(json.dumps(text))
    (newest / name).unlink()
    os.mkfifo(newest / name)
    assert f"{newest / name}: is no regular file" in refused(newest)


def test_a_committed_version_that_no_replica_has_is_named(two: list[Path]) -> None:
    manifest = json.loads((two[1] / NAME).read_text())
    manifest["committed"] = ["replica-r0.safetensors"]
    (two[1] / NAME).write_text(json.dumps(manifest))
    with pytest.raises(BadCheckpoint, match=r"names 'replica-r0.safetensors' as committed, which no replica has"):
        Checkpoint(two[1]).record  # noqa: B018
