"""``ftopt report``: a run's folder, or several, as the page of ``assets/`` with its data inlined.

`record` reads the folder (`stream`, `steps`, `unsupervised`), `merge` puts together what several machines recorded of
one job, `fold` folds the events (`timeline`, `rounds`), `words`, `losses`, `sections` and `compare` say what is shown
(`blocks`), and `write` writes the file. No figure is computed here that `ftopt.watch.summary` computes.
"""
