"""The health check asks where the whole configuration says, without loading it."""

import os
from pathlib import Path

import pytest

from compaction_proxy.cli.admin_client import create_local_client
from compaction_proxy.cli.health import ServerAddress, find_local_client
from compaction_proxy.config.loader import load_config
from compaction_proxy.config.sections import ServerSection

PREFIX = "COMPACTION_PROXY__SERVER__"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_defaults_are_those_of_the_configuration() -> None:
    assert {name: ServerSection.model_fields[name].default for name in ServerAddress._fields} == (
        ServerAddress()._asdict()
    )


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "# nothing\n",
        "server:\n",
        "server: {port: 4242, host: 0.0.0.0}\nupstream: {base_url: 'https://a.example/v1'}\n",
        "server: {host: '::', base_path: /compaction, workers: 1}\n",
        "server: {unix_socket: /run/proxy.sock}\nstore: {url: 'memory://'}\n",
        "server: {tls_certificate: a.pem, tls_key: b.pem}\n",
        "server: {port: '${PORT:-4242}', host: '${HOST}'}\n",
        "models: {'my-*': {window: 32768}}\n",
    ],
)
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HOST": "localhost"},
        {f"{PREFIX}HOST": "0.0.0.0", f"{PREFIX}PORT": "4343"},
        {f"{PREFIX}BASE_PATH": "/other", f"{PREFIX}UNIX_SOCKET": "null"},
        {f"{PREFIX}TLS_CERTIFICATE": "", f"{PREFIX}TLS_KEY": "", f"{PREFIX}DRAIN_S": "7"},
        {f"{PREFIX}port": "4444"},
    ],
)
def test_it_asks_where_the_whole_configuration_says(text: str | None, variables: dict[str, str]) -> None:
    environ = {"HOST": "127.0.0.1", "COMPACTION_PROXY__STORE__URL": "memory://", **variables}
    for name in ("a.pem", "b.pem"):
        Path(name).touch()
    if text is not None:
        Path("config.yaml").write_text(text, encoding="utf-8")
    assert find_local_client(environ) == create_local_client(load_config(None, environ).config.server)


def test_a_file_that_the_environment_names_takes_the_place_of_the_one_in_the_folder() -> None:
    Path("config.yaml").write_text("server: {port: 1}\n", encoding="utf-8")
    Path("mine.yaml").write_text("server: {port: 4242}\n", encoding="utf-8")
    client = find_local_client({"COMPACTION_PROXY_CONFIG": "mine.yaml"})
    assert client is not None
    assert client.url == "http://127.0.0.1:4242"


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("server: [1]\n", {}),
        ("server: {port: x}\n", {}),
        ("server: {port: 0}\n", {}),
        ("server: {host: 1}\n", {}),
        ("server: {port: '${NOWHERE}'}\n", {}),
        ("server: {\n", {}),
        ("", {f"{PREFIX}PORT": "x"}),
        ("", {f"{PREFIX}PORT": "-1"}),
        ("", {"COMPACTION_PROXY__SERVER": '{"port": 4242}'}),
        ("", {"COMPACTION_PROXY_CONFIG": "missing.yaml"}),
    ],
)
def test_what_only_the_whole_configuration_can_tell_is_left_to_it(
    text: str, variables: dict[str, str]
) -> None:
    Path("config.yaml").write_text(text, encoding="utf-8")
    assert find_local_client(variables) is None


def test_it_reads_no_other_variable() -> None:
    assert find_local_client({**os.environ, "COMPACTION_PROXY__SERVERS": "x", "PORT": "1"}) == (
        find_local_client({})
    )
