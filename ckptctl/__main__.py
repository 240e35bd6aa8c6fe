"""The program: ``ckptctl``, ``python -m ckptctl``."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the program; Ctrl-C is answered alike while it is still being imported."""
    # Python looks for reference cycles after every 700 new objects, which takes a sixth of the time
    # of a short command: importing modules and reading indexes makes many objects and no garbage.
    gc.set_threshold(50_000, 20, 50)
    try:
        from ckptctl.cli import app

        app.main()
    except KeyboardInterrupt:
        from ckptctl.cli.output import Printer, StoppedError, wants_json

        Printer(wants_json(sys.argv)).error(StoppedError("interrupted"))
        sys.exit(StoppedError.exit_code)
    finally:
        # The system takes back what is left; Python would look for cycles in all of it first.
        gc.freeze()


if __name__ == "__main__":
    main()
