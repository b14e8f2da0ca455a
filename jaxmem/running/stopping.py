"""SIGTERM, or the first Ctrl-C, asks a run to save and stop: all processes stop after the same step."""

import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """One process: a signal handler sets a flag. Several: jax's preemption service, which catches the signal in whichever process gets it
    and names a step that all of them have yet to reach."""

    def __init__(self) -> None:
        self._asked, self._calls = False, 0
        self._before: dict[int, Any] = {}
        self._alone = jax.process_count() == 1
        if self._alone and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if self._asked:
                raise KeyboardInterrupt
            os.write(2, b"\nsaving after this step; Ctrl-C again stops at once\n")  # print is not for signal handlers
        self._asked = True

    def reached(self) -> bool:
        """Called by every process after every step: stop now."""
        self._calls += 1
        if not self._alone and not self._asked:  # the service says it once
            self._asked = multihost_utils.reached_preemption_sync_point(self._calls)
        return self._asked

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
