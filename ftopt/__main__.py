"""``python -m ftopt``: the command line."""

import sys

from ftopt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
