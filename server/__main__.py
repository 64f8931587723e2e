"""``python -m server`` is the command ``nwor-server``."""

import sys

from server.cli import main

# Guarded because the engine's processes are spawned, which imports this module again.
if __name__ == "__main__":
    sys.exit(main())
