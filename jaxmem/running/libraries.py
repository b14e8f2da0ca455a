"""Where the libraries of a run may talk: in a file of its folder."""

import logging
import pathlib
import sys
from typing import Any


def libraries_to_file(path: pathlib.Path) -> None:
    """What Orbax and grain log (through absl, a page of traceback for a full disk) goes to a file; we say in a line what it means."""
    handler = logging.FileHandler(path, delay=True)
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk must not fill stderr too
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        for old in logger.handlers:
            if isinstance(old, logging.FileHandler):  # of a run before this one, in the same process
                old.close()
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    unraisable = sys.unraisablehook

    def hook(what: Any) -> None:
        if "Event loop is closed" not in str(what.exc_value):  # other reads and writes of a checkpoint that failed, ending
            unraisable(what)
    sys.unraisablehook = hook
