"""`run`: a command beside a proxy, as processes: environment, exit codes, signals, nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import compaction_proxy
from compaction_proxy.cli.run import build_environment

ROOT = Path(compaction_proxy.__file__).parents[2]
URL = "http://127.0.0.1:9/v1"
ASKS = (
    "import os, urllib.request as r, sys; u = os.environ['OPENAI_BASE_URL'];"
    "print(u, r.urlopen(u[:-3] + '/livez').status, flush=True)"
)


def popen(arguments: Sequence[str], folder: Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "compaction_proxy", "run", *arguments],
        cwd=folder,
        env={"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_command_has_a_proxy_of_its_own_which_ends_with_it(tmp_path: Path) -> None:
    code = f"{ASKS}; sys.exit(7)"
    environ = {
        "OPENAI_BASE_URL": "http://127.0.0.1:4141/v1",
        "COMPACTION_PROXY__SERVER__PORT": "1",  # nobody listens there
        "COMPACTION_PROXY__STORE__URL": "memory://",
    }
    with popen(["--log", "log", "--", sys.executable, "-c", code], tmp_path, **environ) as process:
        out, err = process.communicate(timeout=60)
    url, status = out.split()
    assert (process.returncode, status) == (7, "200")
    assert f"compaction-proxy listens on {url.removesuffix('/v1')} until the command ends\n" in err
    log = (tmp_path / "log").read_text()
    assert ("serving.stopped" in log, "Traceback" in log) == (True, False)


def test_signals_reach_the_command_and_its_end_is_told(tmp_path: Path) -> None:
    code = "import signal, time; print('on', flush=True); time.sleep(60)"
    with popen(["--url", URL, "--", sys.executable, "-c", code], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("/", 126)])
def test_a_command_that_cannot_be_run_is_one_line(command: str, code: int, tmp_path: Path) -> None:
    with popen(["--url", URL, "--", command], tmp_path) as process:
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err.count("\n"), err.startswith(f"{command}: ")) == (code, 1, True)


def test_no_command_is_run_with_a_url_that_is_none(tmp_path: Path) -> None:
    with popen(["--url", "http://[bad", "--", "touch", "made"], tmp_path) as process:
        _, err = process.communicate(timeout=30)
    said = "--url: 'http://[bad' is not a base URL such as http://127.0.0.1:4141\n"
    assert (process.returncode, err, (tmp_path / "made").exists()) == (2, said, False)


def test_the_environment_names_the_proxy_wherever_clients_look() -> None:
    assert build_environment({"A": "b", "OPENAI_API_BASE": "old"}, "http://h:1", "s-1") == {
        "A": "b",
        **dict.fromkeys(
            ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_BASE_URL", "AIDER_OPENAI_API_BASE",
             "OPENAI_PROXY_URL", "LLM_BASE_URL"),
            "http://h:1/v1",
        ),
        "OPENAI_HOST": "http://h:1",
        "ANTHROPIC_BASE_URL": "http://h:1",
        "OPENAI_CUSTOM_HEADERS": "x-session-id: s-1",
    }  # fmt: skip


def test_what_people_have_set_themselves_stays() -> None:
    own = {
        "OPENAI_CUSTOM_HEADERS": "X-Session-Id: mine",
        "OPENAI_API_KEY": "sk-mine",
        "HTTPS_PROXY": "http://p",
    }
    made = build_environment({**own, "no_proxy": "a.b"}, URL, "s-1", needs_key=True)
    assert {name: made[name] for name in own} == own
    assert (made["no_proxy"], made["NO_PROXY"]) == ("a.b,127.0.0.1,localhost", "a.b,127.0.0.1,localhost")
    assert build_environment({}, URL, "s", needs_key=True)["OPENAI_API_KEY"] == "none-needed"
    added = build_environment({"OPENAI_CUSTOM_HEADERS": "A: b"}, URL, "s")
    assert added["OPENAI_CUSTOM_HEADERS"] == "A: b\nx-session-id: s"
