"""`python -m reasonlab` is `reasonlab`."""

import sys

from reasonlab.cli import main

if __name__ == "__main__":  # worker processes of a study import this module as well
    sys.exit(main())
