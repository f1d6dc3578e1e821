"""`ui`: a link for the proxy that is asked, or one line that says why there is none."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from compaction_proxy.admin.browser_sessions import is_valid_token
from tests.helpers.scripted_admin import Scripted

Run = Callable[..., Result]


def test_it_prints_a_link_and_how_long_it_holds(run: Run, script: Scripted) -> None:
    script.put("GET", "/config", {"values": []})
    done = run("ui", "--url", script.url, COMPACTION_PROXY__SERVER__ADMIN_KEY="k3y")
    url, _, code = done.stdout.strip().partition("?code=")
    assert (done.exit_code, url) == (0, f"{script.url}/ui/sign-in")
    assert is_valid_token("k3y", "link", code)
    assert done.stderr == "The link works once, for 60 seconds.\n"


@pytest.mark.parametrize("key", ["", "none"])
def test_where_no_key_is_needed_it_prints_the_address(key: str, run: Run, script: Scripted) -> None:
    script.put("GET", "/config", {"values": []})
    done = run("ui", "--url", script.url, COMPACTION_PROXY__SERVER__ADMIN_KEY=key)
    assert (done.stdout, done.stderr) == (f"{script.url}/ui\n", "")


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, {"error": {"message": "Send the key."}}, "the proxy rejects the admin key"),
        (403, {"error": {"message": "To use the admin API, set server.admin_key."}}, "set server.admin_key"),
        (200, {"models": []}, "not a compaction-proxy"),
        (200, 5, "not a compaction-proxy"),
        (200, None, "not a compaction-proxy"),
    ],
)
def test_what_would_fail_in_the_browser_is_one_line(
    status: int, body: object, why: str, run: Run, script: Scripted
) -> None:
    script.answers["GET", "/admin/v1/config"] = (status, body)
    done = run("ui", "--url", script.url)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert why in done.stderr


def test_a_browser_cannot_reach_a_unix_socket(run: Run, tmp_path: Path) -> None:
    done = run("ui", COMPACTION_PROXY__SERVER__UNIX_SOCKET=str(tmp_path / "x.sock"))
    assert (done.exit_code, done.stdout, "Unix socket" in done.stderr) == (1, "", True)
