"""`python -m tejit`."""

import sys

from tejit.jit.cli import main

if __name__ == "__main__":
    sys.exit(main())
