"""Who gets into admin API and dashboard of a proxy on loopback that nobody has given a key.

That a request comes from this machine says nothing of who sends it: a reverse proxy, a tunnel and other users
of the machine look the same. So the first start makes a key, and a link opens the dashboard.
"""

import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.system.black_box import (
    COMMAND,
    REQUEST_LIMIT_S,
    START_LIMIT_S,
    Provider,
    Proxy,
    run_command,
    run_proxy,
)

CONFIG_PATH = "/admin/v1/config"
PATHS = (CONFIG_PATH, "/admin/v1/conversations", "/ui", "/ui/settings", "/ui/static/pages.css")
OPEN_PATHS = ("/livez", "/readyz", "/health", "/metrics")


def configure(folder: Path, **server: Any) -> dict[str, Any]:
    """A configuration without a key, with a store in a file."""
    return {"server": {"admin_key": "", **server}, "store": {"url": f"sqlite:///{folder}/data/state.db"}}


def find_key_file(folder: Path) -> Path:
    return folder / "data" / "state.db.admin_key"


def ask_for_link(proxy: Proxy, base_path: str = "") -> str:
    """What `ui` prints."""
    done = run_command(proxy.folder, "ui", "--url", proxy.url + base_path, "--config", "config.json")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    return done.stdout.strip()


def open_session(proxy: Proxy) -> dict[str, str]:
    """The header field of a browser that has followed a link."""
    opened = httpx.get(ask_for_link(proxy), timeout=REQUEST_LIMIT_S)
    assert opened.status_code == 303, opened.text
    return {"cookie": opened.headers["set-cookie"].partition(";")[0]}


@pytest.fixture
def proxy(tmp_path: Path, provider: Provider) -> Iterator[Proxy]:
    """A proxy on loopback that nobody has given a key."""
    with run_proxy(tmp_path, provider.url, configure(tmp_path)) as running:
        yield running


def test_on_loopback_nobody_gets_in_without_the_key_that_the_first_start_makes(proxy: Proxy) -> None:
    with proxy.client() as client:
        refused = {path: client.get(path).status_code for path in PATHS}
        assert refused == dict.fromkeys(PATHS, 401)
        assert "next to its store" in client.get(CONFIG_PATH).json()["error"]["message"]
        assert [client.get(path).status_code for path in OPEN_PATHS] == [200] * len(OPEN_PATHS)
        path = find_key_file(proxy.folder)
        key = path.read_text().strip()
        assert (stat.S_IMODE(path.stat().st_mode), len(key)) == (0o600, 64)
        client.headers["authorization"] = f"Bearer {key}"
        assert {client.get(path).status_code for path in PATHS} == {200}


def test_the_next_start_takes_the_same_key(tmp_path: Path, provider: Provider) -> None:
    keys = []
    for _ in range(2):
        with run_proxy(tmp_path, provider.url, configure(tmp_path)) as proxy, proxy.client() as client:
            keys.append(find_key_file(tmp_path).read_text().strip())
            shown = {"authorization": f"Bearer {keys[-1]}"}
            assert client.get(CONFIG_PATH, headers=shown).status_code == 200
    assert keys[0] == keys[1]


def test_another_configuration_leaves_the_key_and_the_sessions(proxy: Proxy) -> None:
    shown = open_session(proxy)
    path = proxy.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "models": {"m": {"window": 9_000}}}))
    proxy.process.send_signal(signal.SIGHUP)
    [line] = proxy.wait_for(lambda: proxy.log_lines("config.reloaded"), "it is read again")
    assert line["changed"] == ["models"]
    with proxy.client() as client:
        key = find_key_file(proxy.folder).read_text().strip()
        assert client.get("/ui/settings", headers=shown).status_code == 200
        assert client.get(CONFIG_PATH, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert client.get(CONFIG_PATH).status_code == 401


def test_proxies_that_start_at_once_agree_on_one_key(tmp_path: Path, provider: Provider) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for each in folders:
        each.mkdir()
    with ExitStack() as stack, ThreadPoolExecutor() as starting:

        def start(folder: Path) -> Proxy:
            return stack.enter_context(run_proxy(folder, provider.url, configure(tmp_path)))

        proxies = list(starting.map(start, folders))
        shown = {"authorization": f"Bearer {find_key_file(tmp_path).read_text().strip()}"}
        statuses = [httpx.get(each.url + CONFIG_PATH, headers=shown).status_code for each in proxies]
    assert statuses == [200] * len(folders)
    assert [each.name for each in (tmp_path / "data").glob("*admin_key*")] == ["state.db.admin_key"]


@pytest.mark.parametrize("store", ["file", "memory"])
def test_commands_of_the_same_user_go_on_and_those_of_others_are_refused(
    store: str, tmp_path: Path, provider: Provider
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    config = configure(tmp_path) if store == "file" else {"server": {"admin_key": ""}}
    with run_proxy(home, provider.url, config) as proxy:
        listed = run_command(
            home, "sessions", "list", "--url", proxy.url, "--config", "config.json", "--json"
        )
        assert (listed.returncode, json.loads(listed.stdout)["conversations"]) == (0, [])
        settings = json.loads((home / "config.json").read_text())
        settings["server"]["port"] = int(proxy.url.rpartition(":")[2])
        (home / "config.json").write_text(json.dumps(settings))
        as_configured = run_command(home, "savings", "--config", "config.json", "--json")
        assert as_configured.returncode == 0, as_configured.stderr
        refused = run_command(other, "sessions", "list", "--url", proxy.url)
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
        assert "the proxy rejects the admin key" in refused.stderr


def test_a_link_opens_the_dashboard_once(proxy: Proxy) -> None:
    link = ask_for_link(proxy)
    port = urlsplit(proxy.url).port
    assert link.startswith(f"{proxy.url}/ui/")
    with proxy.client() as client:
        looked = client.head(link)  # a program that looks at links does not use them up
        assert (looked.status_code, looked.headers["allow"]) == (405, "GET")
        opened = client.get(link)
        assert (opened.status_code, opened.headers["location"]) == (303, "/ui")
        assert opened.headers["referrer-policy"] == "no-referrer"
        assert opened.headers["cache-control"] == "no-store"
        cookie, *attributes = re.split(r"; *", opened.headers["set-cookie"])
        name, _, value = cookie.partition("=")
        assert str(port) in name
        assert {each.lower() for each in attributes} == {"httponly", "samesite=strict", "path=/ui"}
        key = find_key_file(proxy.folder).read_text().strip()
        assert key not in opened.text + str(opened.headers) + link
        client.cookies.clear()
        used = client.get(link)
        assert (used.status_code, used.headers["www-authenticate"]) == (401, "Bearer")
        assert "used before" in used.text
        assert "set-cookie" not in used.headers
        page = client.get("/ui", headers={"cookie": cookie})
        assert (page.status_code, "<h1>Overview</h1>" in page.text) == (200, True)
        for wrong in (f"{name}x={value}", f"{name}={value[:-1]}", f"{name}={link.rpartition('=')[2]}"):
            assert client.get("/ui", headers={"cookie": wrong}).status_code == 401
        assert client.get("/ui", headers={"cookie": f"{name}=planted; {cookie}"}).status_code == 200


def test_a_session_is_for_the_pages_and_not_for_the_admin_api(proxy: Proxy) -> None:
    with proxy.client(headers=open_session(proxy)) as client:
        assert client.get("/ui/settings").status_code == 200
        assert client.get(CONFIG_PATH).status_code == 401


def test_a_form_with_a_session_must_come_from_a_page_of_ours(proxy: Proxy) -> None:
    with proxy.client(headers=open_session(proxy)) as client:

        def send_form(**headers: str) -> int:
            return client.post("/ui/playground", data={"model": "m"}, headers=headers).status_code

        assert send_form() == 403
        assert send_form(origin="http://127.0.0.1:3000") == 403  # another port is the same site to a browser
        assert send_form(origin="null") == 403
        assert send_form(origin=proxy.url, **{"sec-fetch-site": "same-site"}) == 403
        assert send_form(origin=proxy.url) == 422  # it is read, and names no transcript


def test_a_browser_without_a_session_is_told_which_command_prints_a_link(proxy: Proxy) -> None:
    refused = httpx.get(f"{proxy.url}/ui/conversations")
    assert (refused.status_code, refused.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "basic" not in refused.headers["www-authenticate"].lower()  # nobody knows the key by heart
    command = re.search(r"<code>(.*)</code>", refused.text)
    assert command
    assert command[1] == f"compaction-proxy ui --url {proxy.url}"
    assert not re.search(r"(?:src|href)=\"(?!data:|/ui\")", refused.text)  # it could load nothing else


@pytest.mark.parametrize("key", ["", "a-configured-key"])
def test_a_link_on_another_site_finds_the_session_whose_cookie_the_browser_holds_back(
    key: str, tmp_path: Path, provider: Provider
) -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    with run_proxy(tmp_path, provider.url, configure(tmp_path, admin_key=key)) as proxy:
        shown = open_session(proxy)
        with proxy.client() as client:
            # The page opens its own address again: that request is of the same site, and has the cookie.
            first = client.get("/ui/settings", headers=followed)
            assert (first.status_code, first.headers.get("refresh")) == (401, "0")
            assert first.headers["www-authenticate"] == "Bearer"  # nobody is asked for a password meanwhile
            again = {**followed, "sec-fetch-site": "same-origin"}
            assert client.get("/ui/settings", headers={**again, **shown}).status_code == 200
            # Without a session that ends there.
            refused = client.get("/ui/settings", headers=again)
            assert (refused.status_code, "refresh" in refused.headers) == (401, False)
            assert refused.headers["www-authenticate"].startswith("Basic" if key else "Bearer")
            used = client.get("/ui/sign-in?code=x", headers=followed)
            assert (used.status_code, "refresh" in used.headers) == (401, False)


@pytest.mark.parametrize("base_path", ["", "/own"])
def test_every_worker_takes_the_link_and_the_session(
    base_path: str, tmp_path: Path, provider: Provider
) -> None:
    with run_proxy(tmp_path, provider.url, configure(tmp_path, workers=2, base_path=base_path)) as proxy:
        link = ask_for_link(proxy, base_path)
        assert link.startswith(f"{proxy.url}{base_path}/ui/")

        def follow_link(_: int) -> httpx.Response:
            return httpx.get(link, timeout=REQUEST_LIMIT_S)  # each on a connection of its own

        with ThreadPoolExecutor(8) as browsers:
            answers = list(browsers.map(follow_link, range(16)))
        assert sorted(each.status_code for each in answers) == [303] + [401] * 15
        [opened] = [each for each in answers if each.status_code == 303]
        assert f"Path={base_path}/ui" in opened.headers["set-cookie"]
        shown = {"cookie": opened.headers["set-cookie"].partition(";")[0]}
        pages = [httpx.get(f"{proxy.url}{base_path}/ui", headers=shown).status_code for _ in range(16)]
        assert pages == [200] * 16


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://127.0.0.1:9/0", "replicas share"),
        ("sqlite:///{folder}/config.json/state.db", "the proxy cannot save a key next to the store: "),
    ],
)
def test_where_no_key_can_be_kept_admin_is_closed_and_says_why(
    url: str, why: str, tmp_path: Path, provider: Provider
) -> None:
    config = {"server": {"admin_key": ""}, "store": {"url": url.format(folder=tmp_path)}}
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        refused = client.get(CONFIG_PATH)
        assert refused.status_code == 403
        message = refused.json()["error"]["message"]
        assert "server.admin_key" in message
        assert why in message
        assert (client.get("/ui").status_code, why in client.get("/ui").text) == (403, True)
        assert client.get("/metrics").status_code == 200
        assert [why in line["reason"] for line in proxy.log_lines("admin.closed")] == [True]
        assert any("dashboard closed" in line and why in line for line in proxy.banner)
    assert not list(tmp_path.rglob("*.admin_key"))


@pytest.mark.parametrize("server", [{"host": "0.0.0.0"}, {"unix_socket": "{folder}/proxy.sock"}])
def test_elsewhere_no_key_is_made(server: dict[str, str], tmp_path: Path, provider: Provider) -> None:
    server = {name: value.format(folder=tmp_path) for name, value in server.items()}
    with run_proxy(tmp_path, provider.url, configure(tmp_path, **server)) as proxy:
        transport = httpx.HTTPTransport(uds=server.get("unix_socket"))
        url = "http://localhost" if "unix_socket" in server else proxy.url
        with httpx.Client(transport=transport, base_url=url) as client:
            refused = client.get(CONFIG_PATH)
        assert (refused.status_code, "server.admin_key" in refused.text) == (403, True)
    assert not list(tmp_path.rglob("*.admin_key"))


def test_a_key_that_others_can_read_is_not_taken(tmp_path: Path, provider: Provider) -> None:
    path = find_key_file(tmp_path)
    path.parent.mkdir()
    path.write_text("ab" * 32)
    path.chmod(0o644)
    with run_proxy(tmp_path, provider.url, configure(tmp_path)) as proxy:
        refused = httpx.get(proxy.url + CONFIG_PATH, headers={"authorization": f"Bearer {'ab' * 32}"})
    assert (refused.status_code, "other users can read it" in refused.text) == (403, True)
    assert str(tmp_path) not in refused.text


@pytest.mark.parametrize("server", [{"host": "0.0.0.0"}, {"host": "::"}, {"unix_socket": "/run/proxy.sock"}])
@pytest.mark.parametrize("command", ["check", "serve"])
def test_no_key_at_all_is_refused_where_others_reach_the_address(
    command: str, server: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps({"server": {"admin_key": "none", "port": 0, **server}}))
    done = run_command(tmp_path, command)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "server.admin_key: `none`" in done.stderr


def test_no_key_at_all_lets_this_machine_in_and_no_other_name(tmp_path: Path, provider: Provider) -> None:
    config = configure(tmp_path, admin_key="none")
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        assert [client.get(path).status_code for path in PATHS] == [200] * len(PATHS)
        assert client.get(CONFIG_PATH, headers={"host": "evil.example"}).status_code == 403
        assert client.get(CONFIG_PATH, headers={"x-forwarded-for": "1.2.3.4"}).status_code == 403
        done = run_command(tmp_path, "ui", "--url", proxy.url, "--config", "config.json")
        assert client.get(done.stdout.strip(), follow_redirects=True).status_code == 200
    assert not find_key_file(tmp_path).exists()


def test_without_a_terminal_only_the_key_s_file_is_told(proxy: Proxy) -> None:
    key = find_key_file(proxy.folder)
    lines = proxy.wait_for(lambda: proxy.log_lines("admin.key_made"), "it is logged behind the banner")
    assert [line["file"] for line in lines] == [str(key)]
    told = "\n".join(proxy.banner) + proxy.log_path.read_text()
    assert f"{proxy.url}/ui" in told
    assert "code=" not in told
    assert key.read_text().strip() not in told


@contextmanager
def on_terminal(folder: Path, *arguments: str) -> Iterator[Iterator[str]]:
    """Runs a command on a terminal; gives its lines as they come."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, *arguments], cwd=folder, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
        env={"HOME": str(folder), "PATH": os.environ["PATH"], "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)

    def read_lines() -> Iterator[str]:
        text, deadline = "", time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                text += os.read(ours, 65_536).decode()
            *lines, text = text.split("\n")
            yield from lines

    try:
        yield read_lines()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize("arguments", [("serve", "--port", "0"), ("demo", "--keep")])
def test_on_a_terminal_a_link_is_printed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with on_terminal(tmp_path, *arguments) as lines:
        link = next(found[0] for line in lines if (found := re.search(r"http://\S+code=\S+", line)))
        opened = httpx.get(link, timeout=REQUEST_LIMIT_S)
        assert opened.status_code == 303
        shown = {"cookie": opened.headers["set-cookie"].partition(";")[0]}
        page = httpx.get(link.partition("/ui/")[0] + "/ui", headers=shown)
    assert (page.status_code, "<h1>Overview</h1>" in page.text) == (200, True)


def test_a_link_for_a_proxy_that_is_away_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = run_command(tmp_path, "ui", "--url", f"http://127.0.0.1:{port}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no server is running there" in done.stderr
