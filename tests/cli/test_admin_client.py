"""The commands about a running proxy, against one: a request is relayed, and each of them tells of it."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import compaction_proxy
from compaction_proxy.cli.admin_client import create_admin_client, fetch_state
from tests.helpers.scripted_admin import Scripted, scripted_admin

ROOT = Path(compaction_proxy.__file__).parents[2]
Run = Callable[..., Result]
PATIENCE_S = 60.0
USAGE = {"prompt_tokens": 900, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 600}}
ANSWER = {
    "id": "x", "object": "chat.completion", "model": "gpt-4.1", "usage": USAGE,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
}  # fmt: skip


@contextmanager
def serving(folder: Path, upstream: str) -> Iterator[str]:
    """A proxy before an upstream; gives its URL."""
    environ = {
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "COMPACTION_PROXY__SERVER__ADMIN_KEY": "hunter2",
        "COMPACTION_PROXY__STORE__URL": "memory://",
    }
    command = [
        sys.executable,
        "-m",
        "compaction_proxy",
        "serve",
        "--port",
        "0",
        "--upstream",
        f"{upstream}/v1",
    ]
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().rstrip().rpartition(" ")[2]
        for line in process.stdout:
            if "OPENAI_BASE_URL" in line:
                break
        yield url
        process.kill()


def ask(url: str) -> None:
    body = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"content-type": "application/json", "x-session-id": "s-1", "authorization": "Bearer sk-1"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=100) as answer:
        assert json.load(answer)["id"] == "x"


def test_every_listing_tells_of_a_request(run: Run, tmp_path: Path) -> None:
    with scripted_admin() as upstream, serving(tmp_path, upstream.url) as url:
        upstream.answers["POST", "/v1/chat/completions"] = (200, ANSWER)
        ask(url)

        def told(*arguments: str) -> Any:
            done = run(*arguments, "--url", url, "--json", COMPACTION_PROXY__SERVER__ADMIN_KEY="hunter2")
            assert done.exit_code == 0, done.output
            return json.loads(done.stdout)

        until = time.monotonic() + PATIENCE_S
        while not (rows := told("sessions", "list")["conversations"]):  # noted once a second
            assert time.monotonic() < until
            time.sleep(0.1)
        assert [(row["requests"], row["prompt_tokens"], row["cached_tokens"]) for row in rows] == [
            (1, 900, 600)
        ]
        total = told("savings", "--since", "1h")["total"]
        assert (total["requests"], total["prompt_tokens"], total["cached_tokens"]) == (1, 900, 600)
        assert told("sessions", "show", rows[0]["id"][:8])["conversation"]["id"] == rows[0]["id"]
        assert "gpt-4.1" in [row["model"] for row in told("models")["models"]]
        refused = run("sessions", "list", "--url", url, COMPACTION_PROXY__SERVER__ADMIN_KEY="wrong")
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
        assert "the proxy rejects the admin key" in refused.stderr


@pytest.mark.parametrize("body", [b"<html>", b"[" * 60_000, b"[]", b'{"store": "ok"}', b"\xff"])
def test_a_program_that_is_no_proxy_has_no_version(script: Scripted, body: bytes) -> None:
    script.answers["GET", "/readyz"] = (200, body)

    assert fetch_state(create_admin_client(script.url, None)) is None


@pytest.mark.parametrize(
    ("url", "is_sent"),
    [
        (None, True),
        ("http://127.0.0.1:5/own", True),
        ("https://localhost:5", True),
        ("http://127.0.0.1.evil.example:5", False),
        ("http://10.0.0.7:5", False),
    ],
)
@pytest.mark.parametrize("has_file", [True, False])
def test_the_key_that_the_proxy_has_made_is_sent_to_loopback_addresses_only(
    url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sent: bool, has_file: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    key, folder = "ab" * 32, tmp_path / ".local" / "share" / "compaction-proxy"
    folder.mkdir(parents=True)
    (folder / "state.db.admin_key").write_text(key)
    if has_file:
        (tmp_path / "config.yaml").write_text("server: {port: 5}\n")
    sent = create_admin_client(url, None).headers
    assert sent == ({"authorization": f"Bearer {key}"} if is_sent else {})
