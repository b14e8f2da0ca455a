"""What a person sees while a run goes: a bar on a terminal, a line now and then elsewhere. On stderr."""

import sys
import time
from typing import Any

EVERY_S = 10.0


class Progress:
    def __init__(self, steps: int, at: int, *, shown: bool) -> None:
        self._steps, self._shown, self._last, self._bar = steps, shown, 0.0, None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=at, unit="step", dynamic_ncols=True, file=sys.stderr)

    def show(self, line: dict[str, Any]) -> None:
        """A step that counts."""
        if not self._shown:
            return
        rate = line["tokens_per_s"]
        parts = [f"loss {line['loss']:.4f}", f"{rate:,.0f} tokens/s" if rate else "", f"MFU {line['mfu']:.1%}" if line["mfu"] else ""]
        text = "  ".join(filter(None, parts))
        if self._bar is not None:
            self._bar.n = line["step"]
            self._bar.set_postfix_str(text)
        elif time.monotonic() - self._last >= EVERY_S or line["step"] == self._steps:
            self._last = time.monotonic()
            print(f"step {line['step']}/{self._steps}  {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line beside the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
