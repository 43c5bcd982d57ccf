"""``base``: a recipe's file on top of another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.cli.main import main
from ftopt.config.loader import dump, load
from ftopt.errors import UserError
from ftopt.methods import LocalSGD


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; recipes are in another one."""
    there = tmp_path / "recipes"
    (there / "parts").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return there


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(source: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(source, overrides)
    return str(caught.value)


def test_a_file_changes_settings_of_a_shipped_recipe(folder: Path) -> None:
    mine = write(folder / "mine.yaml", "base: diloco_bytes\nname: mine\nmethod: {sync_every: 20}\ntrain: {seed: 3}\n")
    wanted = load("diloco_bytes", ["name=mine", "method.sync_every=20", "train.seed=3"])
    assert load(mine) == wanted
    assert load(mine, ["train.seed=4"]).train.seed == 4


def test_another_choice_drops_the_settings_that_it_does_not_have(folder: Path) -> None:
    mine = write(folder / "mine.yaml", "base: diloco_bytes\nmethod: {name: local_sgd}\n")
    assert load(mine).method == LocalSGD(sync_every=50)
    assert load(mine).name == "diloco_bytes"


def test_a_base_is_a_path_relative_to_its_file_and_may_have_a_base(folder: Path) -> None:
    write(folder / "parts" / "first.yaml", "base: diloco_bytes\nname: first\nreplicas: 2\ntrain: {seed: 1}\n")
    write(folder / "second.yaml", "base: parts/first.yaml\nname: second\ntrain: {eval_every: 7}\n")
    third = write(folder / "parts" / "third.yaml", "base: ../second.yaml\nname: third\nreplicas: 3\n")
    overrides = ["name=third", "replicas=3", "train.seed=1", "train.eval_every=7"]
    assert load(third) == load("diloco_bytes", overrides)


def test_factories_are_found_beside_the_file_that_names_them(folder: Path) -> None:
    for name in ("parts", "."):
        code = "from torch import nn\n\n\ndef model():\n    return nn.Linear(1, 1)\n"
        write(folder / name / f"code_{name.strip('.')}.py", code)
    write(folder / "parts" / "first.yaml", "base: own_images\nmodel: {factory: 'code_parts.py:model', args: {}}\n")
    second = write(folder / "second.yaml", "base: parts/first.yaml\nname: second\n")
    assert load(second).model.factory == f"{folder}/parts/code_parts.py:model"
    third = write(folder / "third.yaml", "base: second.yaml\nmodel: {factory: 'code_.py:model'}\n")
    assert load(third).model.factory == f"{folder}/code_.py:model"


@pytest.mark.parametrize(
    ("base", "part"),
    [
        ("dilco_bytes", "base='dilco_bytes' is neither a shipped recipe nor a file in "),
        ("dilco_bytes", "did you mean diloco_bytes?"),
        ("thrid.yaml", "third.yaml?"),
        ("[a]", "base=['a']; must be the name of a shipped recipe, or the path of a file"),
        ("''", "base=''; must be"),
        ("null", "base=None; must be"),
        ("parts", "base='parts' is neither"),
        ("mine.yaml", "base is a circle: mine.yaml -> mine.yaml; one of them must have no base"),
        ("round.yaml", "base is a circle: mine.yaml -> round.yaml -> mine.yaml;"),
    ],
)
def test_a_wrong_base_is_refused(folder: Path, base: str, part: str) -> None:
    write(folder / "third.yaml", "base: diloco_bytes\n")
    write(folder / "round.yaml", "base: mine.yaml\n")
    mine = write(folder / "mine.yaml", f"base: {base}\nname: mine\n")
    assert part in refused(mine)
    assert refused(mine).startswith(f"{folder}/")
    assert main(["validate", mine]) == 2


def test_errors_in_a_base_are_told_with_those_of_the_file(folder: Path) -> None:
    write(folder / "first.yaml", "base: diloco_bytes\ntrain: {inner_stpes: 3}\n")
    mine = write(folder / "mine.yaml", "base: first.yaml\nreplicas: 0\n")
    assert "2 errors" in refused(mine)


def test_an_override_cannot_change_the_base() -> None:
    assert "an override cannot change the base" in refused("diloco_bytes", "base=localsgd_bytes")


def test_a_resolved_recipe_has_no_base(folder: Path) -> None:
    recipe = load(write(folder / "mine.yaml", "base: diloco_bytes\nname: mine\n"))
    text = dump(recipe)
    assert "base:" not in text and "weight_decay:" in text
    assert load(write(folder / "recipe.yaml", text)) == recipe


def test_a_copy_keeps_a_shipped_base(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "localsgd_bytes"]) == 0
    assert "its base, diloco_bytes" in capsys.readouterr().out
    assert "\nbase: diloco_bytes\n" in Path("localsgd_bytes.yaml").read_text("utf-8")
    assert load("./localsgd_bytes.yaml") == load("localsgd_bytes")


@pytest.mark.parametrize("name", ["localsgd_bytes", "own_images"])
def test_a_full_copy_has_all_settings_and_the_comments_at_the_top(name: str) -> None:
    assert main(["cp", name, "--full"]) == 0
    text = Path(f"{name}.yaml").read_text("utf-8")
    assert text.startswith("# ") and "base:" not in text and "give_up_after: 20" in text
    assert ("factory: own_images.py:model" in text) == (name == "own_images")
    assert load(f"./{name}.yaml").name == name


def test_a_copy_of_a_file_whose_base_is_a_file_has_all_settings(folder: Path) -> None:
    write(folder / "first.yaml", "base: diloco_bytes\nreplicas: 2\n")
    mine = write(folder / "mine.yaml", "# My recipe\n\nbase: first.yaml\nname: mine\n")
    assert main(["cp", mine, "."]) == 0
    assert Path("mine.yaml").read_text("utf-8").startswith("# My recipe\n\nname: mine\n")
    assert load("./mine.yaml") == load(mine)
