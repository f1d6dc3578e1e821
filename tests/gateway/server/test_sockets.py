"""Listening sockets on ports and paths, and certificates that can be served."""

import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.core.errors import ConfigError
from compaction_proxy.gateway.server import (
    PORT_IS_SPREAD,
    build_base_url,
    build_tls_context,
    can_spread_connections,
    listen,
    listen_on_unix_path,
    remove_socket_on_exit,
)
from tests.helpers.certificates import HOUR, self_signed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "proxy.sock"


def write_certificate(folder: Path, name: str = "one", **options: Any) -> tuple[str, str]:
    """Writes a certificate and its key, and returns their paths."""
    files = folder / f"{name}.crt", folder / f"{name}.key"
    for file, pem in zip(files, self_signed(**options), strict=True):
        file.write_bytes(pem)
    return str(files[0]), str(files[1])


def find_tls_fault(certificate: str, key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build_tls_context(certificate, key)
    return str(caught.value)


def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        listen("127.0.0.1", taken.getsockname()[1])
    assert str(caught.value).endswith("Address already in use")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "127.0.0..1", "x" * 70])
def test_an_address_that_is_not_ours_is_a_configuration_error(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"server\.host: cannot listen on {host}:0: "):
        listen(host, 0)


@pytest.mark.parametrize(("host", "seen"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_url_is_one_that_works_on_this_machine(host: str, seen: str) -> None:
    with listen(host, 0) as bound:
        assert build_base_url(bound) == f"http://{seen}:{bound.getsockname()[1]}"


@pytest.mark.parametrize("spread", [False, PORT_IS_SPREAD])
def test_what_is_accepted_sends_without_waiting_for_acknowledgements(*, spread: bool) -> None:
    with listen("127.0.0.1", 0, share_port=spread) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_beyond_the_last_one_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="the largest port is 65535"):
        listen("127.0.0.1", 65_536 + 8_080)


@pytest.mark.skipif(not PORT_IS_SPREAD, reason="the system gives all connections to one socket")
def test_several_sockets_share_a_port() -> None:
    with listen("127.0.0.1", 0, share_port=True) as one:
        port = one.getsockname()[1]
        with listen("127.0.0.1", port, share_port=True) as other:
            assert other.getsockname() == one.getsockname()
            assert can_spread_connections(other)


def test_a_unix_socket_is_open_to_its_owner_and_group_only_and_the_umask_is_restored(path: Path) -> None:
    before = os.umask(0o022)
    try:
        with listen_on_unix_path(str(path)) as bound:
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert build_base_url(bound) == f"unix:{path}"
            assert not can_spread_connections(bound)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_the_socket_of_a_dead_process_is_replaced_and_that_of_a_living_one_is_not(path: Path) -> None:
    listen_on_unix_path(str(path)).close()  # the file stays
    with listen_on_unix_path(str(path)) as living, pytest.raises(ConfigError, match="already in use"):
        listen_on_unix_path(str(living.getsockname()))


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("theirs")
    with pytest.raises(ConfigError, match="File exists"):
        listen_on_unix_path(str(path))
    assert path.read_text() == "theirs"


def test_the_file_of_a_socket_is_removed_in_the_end(path: Path) -> None:
    bound = listen_on_unix_path(str(path))
    with remove_socket_on_exit(bound):
        assert path.exists()
        bound.close()
    assert not path.exists()


def test_the_file_of_a_socket_stays_if_another_process_has_replaced_it(path: Path) -> None:
    bound = listen_on_unix_path(str(path))
    with remove_socket_on_exit(bound):
        bound.close()
        successor = listen_on_unix_path(str(path))
    with successor, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_nothing_is_removed_for_a_port(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as bound, remove_socket_on_exit(bound):
        assert build_base_url(bound, "https").startswith("https://127.0.0.1:")


def test_a_certificate_that_holds_is_served(tmp_path: Path) -> None:
    context = build_tls_context(*write_certificate(tmp_path))
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_a_certificate_out_of_its_dates_is_a_configuration_error(tmp_path: Path) -> None:
    expired = write_certificate(tmp_path, "old", begins=-2 * HOUR, ends=-HOUR)
    early = write_certificate(tmp_path, "new", begins=HOUR, ends=2 * HOUR)
    assert find_tls_fault(*expired) == f"server.tls_certificate: {expired[0]} has expired"
    assert find_tls_fault(*early) == f"server.tls_certificate: {early[0]} is not valid yet"


def test_a_key_that_is_locked_or_of_another_certificate_is_a_configuration_error(tmp_path: Path) -> None:
    one, other = write_certificate(tmp_path, "one"), write_certificate(tmp_path, "two")
    locked = write_certificate(tmp_path, "locked", password=b"secret")
    for certificate, key in ((one[0], other[1]), locked):
        assert find_tls_fault(certificate, key).startswith(
            "server.tls_key: the key must match server.tls_certificate"
        )


def test_a_file_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    fault = find_tls_fault(str(tmp_path / "none.crt"), str(tmp_path / "none.key"))
    assert fault == "server.tls_certificate, server.tls_key: cannot read the file: No such file or directory"
