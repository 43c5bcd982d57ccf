"""``ftopt run RECIPE --dry-run``: what a run will do; starts nothing and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftopt.cli.shared.output import explain, loading, say
from ftopt.cli.validate import checked
from ftopt.common.plural import count
from ftopt.watch.report.text import size

if TYPE_CHECKING:
    from ftopt.run.preview import FragmentPlan, Plan

_FRAGMENTS_SHOWN = 32
_NOT_IN_IT = "without activations, data, copies for checkpoints, and torch itself"


def show(source: str, overrides: Sequence[str]) -> int:
    """Prints the resolved recipe and the plan; raises `UserError` with all errors of the recipe."""
    with loading("reading the recipe ..."):
        from ftopt.config.loader import dump
        from ftopt.run.preview import plan_of

        recipe, found = checked(source, overrides)
    assert found.model is not None and found.inner is not None and found.fragments is not None
    plan = plan_of(recipe, found.model, found.inner, found.fragments)
    say(dump(recipe))
    for line in describe(plan, recipe.replicas, recipe.method.codec):
        explain(line)
    say("dry run: nothing was started or written")
    return 0


def describe(plan: Plan, replicas: int, codec: str) -> list[str]:
    frozen = "" if plan.trained == plan.parameters else f", of which {plan.trained:,} train"
    outer_steps = sum(fragment.times for fragment in plan.fragments)
    sent = sum(fragment.times * fragment.bytes for fragment in plan.fragments)
    memory = "; ".join(f"{what} {size(nbytes)}" for what, nbytes in plan.memory.items())
    return [
        f"parameters: {plan.parameters:,}{frozen}",
        f"outer steps: {outer_steps:,} in {count(plan.inner_steps, 'inner step')}, with {count(replicas, 'replica')}",
        f"sent per replica: {size(sent)} in all ({codec})",
        *_table(plan.fragments),
        f"memory per replica: {size(sum(plan.memory.values()))}, an estimate {_NOT_IN_IT}",
        f"  {memory}",
    ]


def _table(fragments: Sequence[FragmentPlan]) -> list[str]:
    lines = []
    for index, part in enumerate(fragments[:_FRAGMENTS_SHOWN]):
        first = [part.first + number * part.every for number in range(min(part.times, 3))]
        steps = ", ".join(map(str, first)) + (", ..." if part.times > 3 else "")
        applied = f", applied {count(part.delay, 'step')} later" if part.delay else ""
        due = f"due at inner step {steps or 'none'} ({count(part.times, 'time')}){applied}"
        lines.append(f"  fragment {index}: {part.elements:,} {part.what}, {size(part.bytes)} per outer step; {due}")
    if len(fragments) > _FRAGMENTS_SHOWN:
        lines.append(f"  and {count(len(fragments) - _FRAGMENTS_SHOWN, 'more fragment')}")
    return lines
