"""How a child process learns of its parent's death: a pipe that only the parent can write to reaches its end."""

from __future__ import annotations

import os
import threading


def exit_with_parent(fd: int) -> None:
    """End this process at once when the pipe ``fd`` reaches its end, also while a long compilation runs."""

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="parent-watch").start()
