"""``python -m lightning_fcl``: the same as ``lightning-fcl``."""

import sys

from lightning_fcl.cli import main

if __name__ == "__main__":
    sys.exit(main())
