"""What ftopt costs, compared with other ways to do the same: one module per benchmark, all measured in one run.

A module has ``ABOUT`` (what is compared, a paragraph), ``GOALS`` (the targets), ``run(quick) -> rows``, and
either ``DRAWN`` (the column that is drawn as bars; ``SCALE = "log"`` for bars of very different size) or ``draw(rows,
path)``. ``PAGE``: where the table belongs, if not in ``performance.md``; `shown` has its columns there. The things
compared are measured in turns, so that load on the machine affects both, and reported as ratios.
"""

NAMES = (
    *("import", "inner", "outer", "codec", "memory", "scale", "control", "stall", "goodput", "failure", "spares"),
    *("join", "joiners", "bandwidth", "utilization", "paft", "convergence", "equal", "islands", "copies", "recovery"),
    *("reuse", "gpu", "gpu_copies"),
)
"""In the order in which they run."""
