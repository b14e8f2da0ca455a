"""A trace of some steps, for TensorBoard's profiler or Perfetto."""

import pathlib

import jax


class Profiler:
    """Traces `count` steps from step `first` into `folder`; `what` is (first, count) or None."""

    def __init__(self, what: tuple[int, int] | None, folder: pathlib.Path) -> None:
        self._what, self._folder, self._going = what, folder, False

    def before(self, step: int) -> None:
        """Called before step `step` is dispatched."""
        if self._what and step == self._what[0] and not self._going:
            jax.profiler.start_trace(str(self._folder))
            self._going = True

    def last(self, step: int) -> bool:
        """The trace ends with `step`: its results must be awaited before `close`."""
        return self._what is not None and self._going and step >= self._what[0] + self._what[1] - 1

    def close(self) -> None:
        if self._going:
            jax.profiler.stop_trace()
            self._going = False
