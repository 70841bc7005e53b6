"""`python -m treadle` is the command line."""

import sys

from treadle.cli import main

if __name__ == "__main__":
    sys.exit(main())
