"""Forecasts of a job: `ftopt plan` for a recipe, `python -m benchmarks simulate` for a trace of failures.

``ftopt plan``:

- `timeline`: compute and transfers on one link, as a pure model; the compute utilization.
- `plan`: a recipe's outer steps on that timeline; failures; bytes and memory.
- `losses`: published and measured figures of the loss that a method costs.
- `recommend`: the settings that are searched, and how one is chosen.
- `calibrate`: measures the step time, the cost of an outer step and the link on this machine.

``python -m benchmarks simulate`` runs the production protocol in virtual time, compared with models of other systems:

- `comparison`: policies side by side; start here.
- `traces`: which machines are there when; `assumptions`: how fast they compute and exchange.
- `world`, `modelled_replica`, `modelled_reduction`, `fleet`, `many_machines`: drive the protocol's state machines.
- `policies`: the other systems; `published`: published throughput; `tally`, `picture`: the results.
"""
