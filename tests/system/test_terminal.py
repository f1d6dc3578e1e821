"""Commands on a terminal: tables that fit, colours, questions before a loss, progress, completion."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import COMMAND, REQUEST_LIMIT_S, Provider, Received, Reply, run_command, run_proxy

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
IDS = [f"c_{number:024x}" for number in range(3)]
TITLES = "id model status used requests rounds last sent last read cached cost net saved"
# Text that is coloured red on a terminal.
RED = "\x1b[31m"


def list_rows() -> list[dict[str, Any]]:
    """Conversations, as the admin API lists them."""
    row = {
        "model": "gpt-5.4", "status": "failed-open", "requests": 1_200, "rounds": 2, "last_at": 0,
        "prompt_tokens": 1_000_000, "cached_tokens": 640_000, "tokens_before": 1_045_000,
        "tokens_after": 112_000, "cost_usd": 1_234.5, "net_usd": -12.25,
    }  # fmt: skip
    return [{"id": name, **row} for name in IDS]


def answer_admin(request: Received) -> Reply:
    return Reply(body=json.dumps({"conversations": list_rows(), "next": None}).encode())


@pytest.fixture
def admin() -> Iterator[Provider]:
    """A server that answers as the admin API does, from a script."""
    made = Provider(answer_admin)
    yield made
    made.close()


class TerminalCommand:
    """A command of the product that runs on a terminal of its own.

    Attributes:
        text: All that the terminal has shown so far.
    """

    def __init__(
        self, folder: Path, *arguments: str, columns: int = 80, environ: Mapping[str, str] | None = None
    ) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        variables = {"HOME": str(folder), "PATH": os.environ["PATH"], "TERM": "xterm", **(environ or {})}
        self._process = subprocess.Popen(
            [COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=variables
        )
        os.close(theirs)
        self._ours = ours
        self._bytes = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65_536)
            except OSError:  # nobody holds the other end any more
                return
            if not data:
                return
            self._bytes += data

    @property
    def text(self) -> str:
        return self._bytes.decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + REQUEST_LIMIT_S
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> tuple[int, str]:
        """Waits for the end of the command. Returns its exit code and what the terminal has shown."""
        code = self._process.wait(REQUEST_LIMIT_S)
        self._reader.join()
        os.close(self._ours)
        return code, self.text


def run_in_pipe(
    folder: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return run_command(folder, *arguments, environ={"TERM": "xterm", **(environ or {})})


@pytest.mark.parametrize("columns", [70, 80, 200])
def test_a_table_fits_its_terminal_and_every_figure_that_it_shows_is_whole(
    columns: int, admin: Provider, tmp_path: Path
) -> None:
    code, shown = TerminalCommand(tmp_path, "sessions", "list", "--url", admin.url, columns=columns).end()
    lines = ESCAPE.sub("", shown).splitlines()
    assert code == 0
    assert max(map(len, lines)) <= columns
    table = [line for line in lines if not line.startswith("too narrow for: ")]
    assert [line.split()[0] for line in table] == ["id", *IDS]
    assert all(line.endswith("-$12.25") for line in table[1:])
    missing = [title for line in lines if line not in table for title in line[16:].split(", ")]
    shown_titles = [title for title in re.split("(?<!last) (?!saved)", TITLES) if title not in missing]
    assert " ".join(table[0].split()) == " ".join(shown_titles)
    assert bool(missing) is (columns < 200)


def test_a_pipe_gets_the_whole_table_without_colours(admin: Provider, tmp_path: Path) -> None:
    done = run_in_pipe(tmp_path, "sessions", "list", "--url", admin.url)
    titles, *lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, " ".join(titles.split())) == (0, "", TITLES)
    assert [line.split()[0] for line in lines] == IDS
    assert "\x1b" not in done.stdout
    assert not any(line.endswith(" ") for line in (titles, *lines))


def test_colours_are_for_terminals_unless_the_environment_says_otherwise(
    admin: Provider, tmp_path: Path
) -> None:
    arguments = ("sessions", "list", "--url", admin.url)
    assert RED in TerminalCommand(tmp_path, *arguments).end()[1]
    assert "\x1b" not in TerminalCommand(tmp_path, *arguments, environ={"NO_COLOR": "1"}).end()[1]
    assert RED in run_in_pipe(tmp_path, *arguments, environ={"FORCE_COLOR": "1"}).stdout
    unreachable = ("sessions", "list", "--url", "http://127.0.0.1:1")
    assert RED in TerminalCommand(tmp_path, *unreachable).end()[1]
    assert "\x1b" not in run_in_pipe(tmp_path, *unreachable).stderr


def test_a_command_that_waits_shows_so_on_a_terminal_and_erases_it(admin: Provider, tmp_path: Path) -> None:
    may_answer = threading.Event()

    def answer_late(request: Received) -> Reply:
        may_answer.wait(REQUEST_LIMIT_S)
        return answer_admin(request)

    admin.answer = answer_late
    command = TerminalCommand(tmp_path, "sessions", "list", "--url", admin.url)
    command.wait_for("waiting for http://127.0.0.1:")
    may_answer.set()
    code, shown = command.end()
    display, _, table = shown.rpartition("\x1b[2K")
    assert (code, "waiting for" in display, "waiting for" in table) == (0, True, False)
    assert all(name in table for name in IDS)


def test_nothing_is_forgotten_unless_somebody_says_so(tmp_path: Path) -> None:
    provider = Provider()
    config = {
        "upstream": {"base_url": provider.url},
        "store": {"url": f"sqlite:///{tmp_path}/state.db"},
        "server": {"admin_key": "admin-key-of-this-test"},
    }
    with run_proxy(tmp_path, provider.url, config) as proxy:
        headers = {"authorization": "Bearer sk-one", "x-session-id": "42"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        with proxy.client(headers=headers) as client:
            assert client.post("/v1/chat/completions", json=body).status_code == 200

        def list_ids() -> list[str]:
            done = proxy.run_command("admin-key-of-this-test", "sessions", "list", "--json")
            return [each["id"] for each in json.loads(done.stdout)["conversations"]]

        [name] = proxy.wait_for(list_ids, "the conversation is listed")
        forget = ("forget", "--config", "config.json", "--credential", "authorization: Bearer sk-one")
        refused = [
            run_in_pipe(tmp_path, *forget),
            proxy.run_command("admin-key-of-this-test", "sessions", "delete", name),
        ]
        assert [(each.returncode, each.stdout, each.stderr) for each in refused] == [
            (1, "", "nothing was deleted: without a terminal, --yes is required\n")
        ] * 2
        command = TerminalCommand(tmp_path, *forget)
        command.wait_for("[y/N]")
        command.type("n\n")
        code, shown = command.end()
        assert (code, "nothing was deleted" in shown, list_ids()) == (1, True, [name])
    command = TerminalCommand(tmp_path, *forget)
    command.wait_for("[y/N]")
    command.type("y\n")
    code, shown = command.end()
    assert (code, re.search(r"\d+ records? deleted", shown) is not None) == (0, True)
    again = run_in_pipe(tmp_path, *forget, "--yes", "--json")
    assert (again.returncode, json.loads(again.stdout)) == (0, {"deleted": 0})
    provider.close()


def complete(shell: str, line: str, folder: Path) -> str:
    """What the program tells a shell that asks how a line may go on."""
    words = line.split(" ")
    environ = {
        "_COMPACTION_PROXY_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = run_in_pipe(folder, environ=environ)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("compaction-proxy sess", "sessions"),
        ("compaction-proxy sessions exp", "export"),
        ("compaction-proxy savings --sh", "--share"),
        ("compaction-proxy savings --by mo", "model"),
        ("compaction-proxy sessions list --sort n", "net"),
        ("compaction-proxy replay --strategy an", "anchored"),
        ("compaction-proxy connect ai", "aider"),
    ],
)
def test_shells_complete_commands_options_and_their_values(
    shell: str, line: str, word: str, tmp_path: Path
) -> None:
    assert re.search(rf"(?<![\w-]){word}(?![\w-])", complete(shell, line, tmp_path))


def test_bash_completes_once_it_has_read_the_script(tmp_path: Path) -> None:
    lines = """
    eval "$(compaction-proxy --show-completion)"
    COMP_WORDS=(compaction-proxy sessions pi) COMP_CWORD=2
    function=$(complete -p compaction-proxy | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
    $function compaction-proxy
    echo "${COMPREPLY[*]}"
    """
    path = f"{Path(COMMAND).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", lines], cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": path},
        capture_output=True, text=True, timeout=REQUEST_LIMIT_S, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("pin\n", "")
