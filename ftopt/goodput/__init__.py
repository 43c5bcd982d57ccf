"""How much of the machines' work ends up in the model: the production protocol under virtual time, beside models of
other systems.

Start with `ftopt.goodput.run`. `ftopt.goodput.traces` says which machines are there when, `ftopt.goodput.model` how
fast they compute and exchange, `ftopt.goodput.world` and `ftopt.goodput.replica` drive the machines of
`ftopt.sync.protocol`, `ftopt.goodput.policies` has the other systems, and `ftopt.goodput.tally` what comes out.
"""
