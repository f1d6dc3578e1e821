"""How far a request travels: files, calls and depth of the proxy's own code, counted by a profiler.

    uv run python bench/trip.py [COMMAND …] [--show]

COMMAND is an installed `compaction-proxy`; by default the one of this environment. Several are measured one
after the other. Each runs as a process with default configuration before a scripted provider whose model has
a window of 8,192 tokens, and gets requests over a socket. The last byte of a request is held back until the
proxy has read all other bytes and is quiet. "Answering" is what happens from that byte to the last byte of
the answer, "afterwards" what happens in the second that follows.

- `own`: calls of the task that calls the endpoint; here, "afterwards" begins where the work after an answer
  begins. On 9b883db, counted from the first byte on: 39 files and 182 calls gated, 68 and 638 read and
  unchanged, 91 and 1,148 for a round applied.
- `all`: calls on any task, callback or thread; here, "afterwards" begins when the last byte is written.

Resumed coroutines count as calls. `--show` lists the files in the order in which they are entered.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for helpers of the tests

from tests.system.black_box import COMMAND, Provider, Received, Reply, chat_reply, run_proxy

MODEL, SUMMARY_MODEL, WINDOW = "demo-agent", "demo-summary", 8_192
QUIET_S = 1.0
RECORDER = Path(__file__).with_name("call_recorder.py")
TURNS = 60
# The function that is called once the client has the answer, now and on 9b883db; and the endpoint's file.
AFTER = ("AfterResponseHandler.__call__", "Aftermath.__call__")
# The function that is called when the last byte of the answer is written, now and on 9b883db.
WRITTEN = ("ServerConnection.on_response_complete", "Connection.answered")
ENDPOINT = "/endpoint.py"

Call = tuple[str, str, int, int]


def find_package(command: str) -> tuple[str, str]:
    """Returns the Python interpreter of a command, and the folder of the package that it runs.

    Raises:
        ValueError: The command is no console script.
    """
    lines = Path(command).read_text("utf-8").splitlines()
    python = lines[0].removeprefix("#!")
    names = [line.split()[1].partition(".")[0] for line in lines if line.startswith("from ")]
    if not names:
        raise ValueError(f"{command} imports no package")
    code = f"import {names[0]} as package; print(package.__path__[0])"
    folder = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return python, folder.strip()


class Recording:
    """The connection to the recorder inside the proxy's process."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rw", encoding="utf-8")

    def ask(self, command: str) -> list[Call] | None:
        """Sends a command and returns its answer."""
        self._lines.write(f"{command}\n")
        self._lines.flush()
        answer: list[Call] | None = json.loads(self._lines.readline())
        return answer


def answer_request(request: Received) -> Reply:
    """Answers like a provider; a summary has the headings that it was asked for."""
    body = request.json() if request.body else {}
    if body.get("model") != SUMMARY_MODEL:
        return chat_reply(request)
    asked = "\n".join(str(each.get("content")) for each in body["messages"])
    headings = dict.fromkeys(line for line in asked.splitlines() if line.startswith("### "))
    return chat_reply(request, "\n\n".join(f"{each}\n- The user asked questions." for each in headings))


def build_messages(turns: int) -> list[dict[str, str]]:
    """A conversation of so many turns, of some 340 tokens each."""
    messages = [{"role": "system", "content": "You are helpful."}]
    for turn in range(turns):
        words = f"alpha beta gamma delta {turn} " * 25
        reply = f"lorem ipsum dolor {turn} " * 33
        messages.append(
            {"role": "user", "content": f"Question {turn}: never touch /etc/{turn}.conf. {words}"}
        )
        messages.append({"role": "assistant", "content": f"Answer {turn}. {reply}"})
    return [*messages, {"role": "user", "content": f"And now {turns}?"}]


class Client:
    """Sends requests on one connection, and records what the last byte of each starts.

    Args:
        url: The proxy.
        recording: Records its calls.
    """

    def __init__(self, url: str, recording: Recording) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._host = host
        self._connection = socket.create_connection((host, int(port)))
        self._recording = recording

    def post(
        self, messages: Sequence[Mapping[str, str]], session: str, *, pause_s: float = QUIET_S
    ) -> tuple[str, list[Call]]:
        """Returns the compaction's status and the calls of one request.

        Half of `pause_s` passes before the last byte of the request, and all of it after the answer.
        """
        body = json.dumps({"model": MODEL, "messages": messages}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer k\r\nx-session-id: {session}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        self._connection.sendall(head + body[:-1])
        time.sleep(pause_s / 2)
        self._recording.ask("start")
        self._connection.sendall(body[-1:])
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._connection.recv(65_536)
        fields, _, rest = received.partition(b"\r\n\r\n")
        names = dict(line.lower().split(b": ", 1) for line in fields.split(b"\r\n")[1:])
        while len(rest) < int(names[b"content-length"]):
            rest += self._connection.recv(65_536)
        time.sleep(pause_s)
        calls = self._recording.ask("stop") or []
        if not fields.startswith(b"HTTP/1.1 200"):
            raise ValueError(fields.decode())
        return names.get(b"x-compaction-status", b"").decode(), calls


@contextmanager
def open_client(command: str) -> Iterator[Client]:
    """A client of a proxy that runs below the recorder."""
    python, package = find_package(command)
    provider = Provider(answer_request)
    config = {
        "server": {"secret": "demo"},
        "summary": {"model": SUMMARY_MODEL},
        "models": {"demo-*": {"window": WINDOW}},
    }
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "recorder")
        listener.bind(address)
        listener.listen()
        wrapper = Path(folder) / "command"
        wrapper.write_text(
            f'#!/bin/sh\nexec "{python}" "{RECORDER}" "{package}" "{address}" "{command}" "$@"\n'
        )
        wrapper.chmod(0o755)
        try:
            with run_proxy(Path(folder), provider.url, config, command=str(wrapper)) as proxy:
                recording = Recording(listener.accept()[0])
                yield Client(proxy.url, recording)
        finally:
            provider.close()


def summarize_calls(calls: Sequence[Call]) -> tuple[int, int, int]:
    """Returns the number of files and of calls, and the greatest depth."""
    return len({call[0] for call in calls}), len(calls), max((call[3] for call in calls), default=0)


def print_trip(case: str, calls: Sequence[Call], *, show: bool) -> None:
    """Prints the counts of one request."""
    owner = next((call[2] for call in calls if call[0].endswith(ENDPOINT)), None)
    own = [call for call in calls if call[2] == owner]
    end = next((place for place, call in enumerate(own) if call[1] in AFTER), len(own))
    written = 1 + next(place for place, call in enumerate(calls) if call[1] in WRITTEN)
    for name, some in (
        ("own, answering", own[:end]),
        ("own, afterwards", own[end:]),
        ("all, answering", calls[:written]),
        ("all, afterwards", calls[written:]),
    ):
        files, count, depth = summarize_calls(some)
        print(f"| {case} | {name} | {files} | {count} | {depth} |")
    if show:
        print("\n" + " > ".join(dict.fromkeys(call[0] for call in calls[:written])) + "\n")
        for call in calls[:written]:
            print(f"  {'. ' * call[3]}{call[0]} {call[1]}")


def measure(command: str, *, show: bool) -> None:
    """Prints the counts of the three kinds of requests."""
    print(
        f"\n{command}\n\n| request | counted | files | calls | deepest |\n| --- | --- | ---: | ---: | ---: |"
    )
    with open_client(command) as client:
        small = [{"role": "user", "content": "Hello"}]
        client.post(small, "s1")
        client.post(small, "s1", pause_s=0)  # what the gate caches for a second is warm
        print_trip("gated", client.post(small, "s1")[1], show=show)
        client.post(build_messages(8), "s2")
        print_trip("read and unchanged, warm", client.post(build_messages(9), "s2")[1], show=show)
        for turns in range(10, TURNS):
            status, calls = client.post(build_messages(turns), "s2")
            if status == "applied":
                print_trip("ready round applied", calls, show=show)
                return
    print("no round was applied")


def main() -> None:
    """Measures each command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="*", default=[COMMAND], metavar="COMMAND")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    for command in options.commands:
        measure(str(Path(command).absolute()), show=options.show)


if __name__ == "__main__":
    main()
