"""Runs a console script and records every call into one package, for `bench/trip.py`.

    python bench/call_recorder.py PACKAGE SOCKET SCRIPT [ARGUMENTS…]

SCRIPT is an installed command, such as `.venv/bin/compaction-proxy`. PACKAGE is the folder whose functions
count. SOCKET is a Unix socket that another process listens on. The recorder connects to it and obeys lines:
`start` begins a recording, and `stop` ends it and answers with one line of JSON, the calls in order. A
generator or coroutine that continues counts as a call.
"""

import asyncio
import json
import runpy
import socket
import sys
import threading
from types import FrameType

# File, function, task (0: a callback of the loop; -1: another thread),
# and number of frames of the package on the stack.
Call = tuple[str, str, int, int]


class CallRecorder:
    """Records calls of functions whose code is in a folder.

    Args:
        folder: The folder of the package, with a slash at its end.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._calls: list[Call] | None = None

    def install(self) -> None:
        """Profiles this thread, and each thread that starts from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        calls = self._calls
        if calls is None or event != "call" or not frame.f_code.co_filename.startswith(self._folder):
            return
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        is_main = threading.current_thread() is threading.main_thread()
        depth, outer = 0, frame
        while outer is not None:
            depth += outer.f_code.co_filename.startswith(self._folder)
            outer = outer.f_back  # type: ignore[assignment]
        owner = id(task) if task is not None else (0 if is_main else -1)
        name = frame.f_code.co_qualname
        calls.append((frame.f_code.co_filename[len(self._folder) :], name, owner, depth))

    def serve(self, connection: socket.socket) -> None:
        """Obeys the lines of the connection until its end."""
        with connection, connection.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                command = line.strip()
                answer: list[Call] | None = None
                if command == "start":
                    self._calls = []
                elif command == "stop":
                    answer, self._calls = self._calls, None
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


def main() -> None:
    """Connects to the bench and runs the command."""
    folder, address, script, *arguments = sys.argv[1:]
    recorder = CallRecorder(folder.rstrip("/") + "/")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    threading.Thread(target=recorder.serve, args=(connection,), daemon=True).start()
    recorder.install()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
