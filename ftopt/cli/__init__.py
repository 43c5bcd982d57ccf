"""The command line: one file a verb, each with ``add(parser)`` and ``run(arguments)``."""
