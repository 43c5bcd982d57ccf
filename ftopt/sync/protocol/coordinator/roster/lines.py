"""The lines by which replicas describe themselves, and whether those of two replicas agree."""

from __future__ import annotations

from collections.abc import Mapping

from ftopt.sync.protocol import messages as m


def differs(name: str, here: str, there: str) -> str:
    """Describes a line that differs from the job's. The model's line has, per fragment, tensors, parameters and a hash
    of their names, shapes and dtypes, which says nothing by itself."""
    parts, theirs = here.split("; "), there.split("; ")
    if name != "model" or "nothing" in (here, there):
        return f"{name}: {here} here, {there} in the job"
    at = next((n for n, pair in enumerate(zip(parts, theirs, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"model: {len(parts)} fragments here, {len(theirs)} in the job"
    (mine, my_hash), (its, its_hash) = parts[at].rpartition(", ")[::2], theirs[at].rpartition(", ")[::2]
    which = f" (fragment {at})" if max(len(parts), len(theirs)) > 1 else ""
    if mine == its:
        return (
            f"another model{which}: as many tensors and parameters, {mine}, but other names, shapes or dtypes "
            f"(their hash is {my_hash} here, {its_hash} in the job)"
        )
    return f"another model{which}: {mine} here, {its} in the job"


OTHER_ORDER = (
    "all parameters have the same names, and their fragments are cut otherwise: by the settings above, or because the "
    "modules were made in another order, as from a set of strings; make them in an order that is the same on all "
    "replicas, sorted() say"
)
FROZEN = "frozen."
_NAMED = 5
"""The most frozen weights that are named."""
INNER = (
    '; inner optimizers may differ with ftopt.FaultPolicy(inner="ignore"), in a recipe policy.inner=ignore, on all '
    "replicas"
)
_TOLD, _CHARS = 8, 200
"""The most differing lines that are shown, and characters of each."""


def frozen_differ(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Which frozen weights differ from the job's; "": none of those with a digest on both sides."""
    both = sorted(name for name in here.keys() & there.keys() if name.startswith(FROZEN))
    wrong = [name.removeprefix(FROZEN) for name in both if here[name] != there[name]]
    if not wrong:
        return ""
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return (
        f"frozen weights, {len(wrong)} of {len(both)}, have other values than in the job: {', '.join(wrong[:_NAMED])}"
        f"{more} (another base model, another download, or another seed): load the same ones on all replicas; if each "
        "is to keep its own, set policy.frozen=ignore on all"
    )


def are_alike(here: Mapping[str, str], there: Mapping[str, str]) -> bool:
    """Whether all lines that must agree do."""
    own = {name for name in here.keys() | there.keys() if name.startswith(m.OWN)}
    return all(here.get(name) == there.get(name) for name in (here.keys() | there.keys()) - own)


def trains_otherwise(here: Mapping[str, str], there: Mapping[str, str], first: str) -> str:
    """How a replica's training differs, perhaps on purpose, from that of the job's ``first`` replica; "": it does
    not."""
    names = sorted(name for name in here.keys() & there.keys() if name.startswith(m.OWN) and here[name] != there[name])
    if not names:
        return ""
    told = "; ".join(
        f"{_cut(name.removeprefix(m.OWN))}: {_cut(here[name])} here, {_cut(there[name])} there"
        for name in names[:_TOLD]
    )
    return (
        f"it trains otherwise than {first}, which connected first: {told}. Rounds average the two alike; if this is "
        'not on purpose, start one of them with the settings of the other (ftopt.FaultPolicy(inner="ignore"), in a '
        "recipe policy.inner=ignore, on all replicas: nothing is compared)"
    )


def _cut(text: str) -> str:
    """A replica's line, cut for logs."""
    plain = "".join(c if c.isprintable() else "?" for c in text[: _CHARS + 1])
    return plain if len(plain) <= _CHARS else f"{plain[:_CHARS]}..."
