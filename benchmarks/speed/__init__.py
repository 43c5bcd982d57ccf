"""What ftopt costs, beside what does the same without it: one module a benchmark, all measured in one run.

A module has ``ABOUT`` (what is compared, a paragraph), ``GOALS`` (what is to be reached), ``DRAWN`` (the column of
the picture) and ``run(quick) -> rows``.
What is compared is measured in turns, so that a busy machine is busy for both, and given as ratios.
"""

NAMES = ("import", "inner", "outer", "codec", "memory", "scale", "control", "stall", "goodput", "join", "bandwidth")
"""In the order in which they run."""
