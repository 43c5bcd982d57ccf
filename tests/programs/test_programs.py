"""Whatever users do in their loops: no step is lost or counted twice, replicas are alike, nothing hangs or leaks."""

from __future__ import annotations

import random

import pytest

from tests.programs.actions import ACTIONS
from tests.programs.program import Action, Life, Program, program_of
from tests.programs.running import failure, quiet, run_all, script

FEW, MANY = 24, 5000
"""By default half of the 24, which wait for most of the time, the others are long; ``-m slow`` runs the many."""


def _run(seeds: range) -> None:
    for program, text in run_all(map(program_of, seeds), at_once=20):
        pytest.fail(f"{text}\n\n{script(program)}\n\nmake it smaller: python -m tests.programs {program.seed}")


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_few_programs(half: int) -> None:
    _run(range(half * FEW // 2, (half + 1) * FEW // 2))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(50))
def test_many_programs(part: int) -> None:
    _run(range(FEW + part * MANY // 50, FEW + (part + 1) * MANY // 50))


def test_a_seed_is_a_program_and_a_program_is_a_script() -> None:
    assert program_of(7) == program_of(7) != program_of(8)
    for seed in range(200):
        assert script(program_of(seed)).count("with optimizer:") >= len(program_of(seed).lives)


def test_all_actions_are_drawn() -> None:
    drawn = {action.name for seed in range(200) for life in program_of(seed).lives for action in life.actions}
    assert drawn == ACTIONS.keys()


def test_a_program_is_made_smaller_until_it_is_empty() -> None:
    program = program_of(random.Random(0).randrange(1000))
    while smaller := next(program.smaller(), None):
        assert smaller.size <= program.size
        program = smaller
    assert program.lives == (Life("r0", 0, ()),)


def test_a_lost_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: a commit counts a step more than there was."""
    from ftopt.step.outer.fragment import Fragment

    discard = Fragment.discard
    monkeypatch.setattr(Fragment, "discard", lambda self, steps: discard(self, steps - 1))
    lives = (Life("r0", 0, (Action("steps", 2), Action("steps_with_what_is_not_finite", "nan"), Action("steps", 5))),)
    program = Program(0, "LocalSGD(sync_every=3)", "fp32", "AdamW(model.parameters(), lr=1e-2)", _PLAIN, False, lives)
    with quiet():
        assert "books do not balance" in failure(program)


_PLAIN = "Sequential(Linear(8, 6), Tanh(), Linear(6, 4))"
