"""SIGTERM asks a run to save and stop: all processes stop after the same step."""

import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """One process: a signal handler sets a flag. Several: jax's preemption service, which catches the signal in whichever process gets it
    and names a step that all of them have yet to reach."""

    def __init__(self) -> None:
        self._asked, self._calls, self._before = False, 0, None
        self._alone = jax.process_count() == 1
        if self._alone and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True

    def reached(self) -> bool:
        """Called by every process after every step: stop now."""
        self._calls += 1
        if not self._alone and not self._asked:  # the service says it once
            self._asked = multihost_utils.reached_preemption_sync_point(self._calls)
        return self._asked

    def close(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
