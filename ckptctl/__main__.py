"""Entry point of ``ckptctl`` and ``python -m ckptctl``."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line, and handle Ctrl-C even while modules are being imported."""
    # Python searches for reference cycles after every 700 new objects, which takes a sixth of the
    # time of a short command: importing modules and reading indexes creates objects, no garbage.
    gc.set_threshold(50_000, 20, 50)
    try:
        from ckptctl.cli import app

        app.main()
    except KeyboardInterrupt:
        from ckptctl.cli.output import Printer, StoppedError, is_json_requested

        Printer(is_json_requested(sys.argv)).print_error(StoppedError("interrupted"))
        sys.exit(StoppedError.exit_code)
    finally:
        # The system frees the memory anyway. Python would first search all of it for cycles.
        gc.freeze()


if __name__ == "__main__":
    main()
