"""`python -m tejit`."""

import sys

from tejit.inspect.info import for_command_line
from tejit.jit.cli import main

if __name__ == "__main__":
    sys.exit(main(collect=for_command_line))
