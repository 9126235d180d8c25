"""A time limit for one client job."""

import signal
import threading
import time
from types import FrameType, TracebackType


class Deadline:
    """Raises :class:`TimeoutError` when its seconds are over.

    Between batches the loop calls :meth:`check`. In the main thread of a POSIX process a timer signal also interrupts
    Python code that waits inside a step; a call that never returns to Python cannot be interrupted.

    Args:
        seconds: The limit; ``None`` for none.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = float("inf")
        self._armed = False

    def __enter__(self) -> "Deadline":
        if self.seconds is not None:
            self._end = time.monotonic() + self.seconds
            if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
                self._previous = signal.signal(signal.SIGALRM, self._interrupt)
                signal.setitimer(signal.ITIMER_REAL, self.seconds)
                self._armed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._previous)
            self._armed = False

    def check(self) -> None:
        """Raise if the limit has passed."""
        if time.monotonic() > self._end:
            self._interrupt(0, None)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the job did not finish within `client_timeout={self.seconds}` seconds")
