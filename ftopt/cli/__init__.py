"""The command line: one file per verb, each with ``add(parser)``, which adds its arguments, and ``run(arguments)``.

Options that only ``ftopt run`` uses are hidden.
"""
