"""Between the parent and its children.

A child learns of its parent's death from a pipe that only the parent can write to: it reaches its end. And children
do not hear SIGTERM or SIGINT, which terminals and service managers send to all processes of a command at once: the
parent alone decides, and tells the API process by signals of its own.
"""

from __future__ import annotations

import os
import signal
import threading

DRAIN_SIGNAL = signal.SIGUSR1
"""Parent to API process: finish what runs."""
CUT_SIGNAL = signal.SIGUSR2
"""Parent to API process: end at once. One signal sent twice could arrive as one."""

NOT_FOR_CHILDREN = {signal.SIGTERM, signal.SIGINT}


def exit_with_parent(fd: int) -> None:
    """End this process at once when the pipe ``fd`` reaches its end, also while a long compilation runs."""

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="parent-watch").start()
