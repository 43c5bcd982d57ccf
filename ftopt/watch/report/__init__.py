"""``ftopt report``: a run's folder, or several, as the page of ``assets/`` with its data inlined.

`record` reads the folder (`stream`, `steps`, `lives`), `merge` joins what several machines recorded of one job, `fold`
folds the events (`timeline`, `rounds`), `words`, `losses`, `sections` and `compare` decide what to show (`blocks`), and
`write` writes the file. Figures that `ftopt.watch.summary` computes are not computed again here.
"""
