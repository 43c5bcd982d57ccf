"""The command line: one file per verb, each with ``add(parser)`` and ``run(arguments)``."""
