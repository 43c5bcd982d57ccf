"""Forecasts of a recipe's job: `ftopt plan`.

- `timeline`: compute and transfers on one link, as a pure model; the compute utilization.
- `plan`: a recipe's outer steps on that timeline; failures; bytes and memory.
- `losses`: published and measured figures of the loss that a method costs.
- `recommend`: the settings that are searched, and how one is chosen.
- `calibrate`: measures the step time, the cost of an outer step and the link on this machine.
"""
