"""What ftopt costs, beside what does the same without it: one module a benchmark, all measured in one run.

A module has ``ABOUT`` (what is compared, a paragraph), ``GOALS`` (what is to be reached), ``run(quick) -> rows``, and
either ``DRAWN`` (the column that is drawn as bars; ``SCALE = "log"`` for bars of unlike size) or ``draw(rows, path)``.
What is compared is measured in turns, so that a busy machine is busy for both, and given as ratios.
"""

NAMES = (
    *("import", "inner", "outer", "codec", "memory", "scale", "control"),
    *("stall", "goodput", "join", "bandwidth", "convergence"),
)
"""In the order in which they run."""
