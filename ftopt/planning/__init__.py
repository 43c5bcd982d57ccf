"""``ftopt plan``: what a job will spend its time on, and which settings spend less of it on anything but training.

- `timeline`: compute and transfers on one link, as a pure model; the compute utilization.
- `forecast`: a recipe's outer steps on that timeline; failures; bytes and memory.
- `losses`: what is published and measured about the loss that a method costs.
- `recommend`: the settings that are searched, and how one is chosen.
- `calibrate`: the step time, the cost of an outer step and the link, measured on this machine.
"""
