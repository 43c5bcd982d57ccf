"""The example of ``docs/data.md`` runs as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_example_trains_through_both_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    optimizer, loader = names["optimizer"], names["loader"]
    assert optimizer.local_steps == 2 * 40  # type: ignore[attr-defined]  # 625 windows by 16
    assert optimizer.pending_steps == 0  # type: ignore[attr-defined]
    assert loader.epoch == 1  # type: ignore[attr-defined]
