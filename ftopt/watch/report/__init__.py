"""``ftopt report``: a run's folder, or several, as one page that needs nothing else.

`run` reads the folder (`steps`, `unsupervised`), `merge` puts together what several machines recorded of one job,
`timeline` and `rounds` fold the events, `words`, `losses`, `sections` and `compare` write the parts, `plot` draws,
`page` puts the parts together, and `write` writes the file. No figure is computed here that `ftopt.watch.summary`
computes.
"""
