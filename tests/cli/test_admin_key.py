"""The admin key that a proxy on loopback makes: where it is kept, who reads it, when there is none."""

import stat
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.cli.admin_key import AdminKeyError, add_admin_key, find_key_path, read_admin_key
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig


def configure(folder: Path, **server: Any) -> Config:
    url = f"sqlite:///{folder}/made/state.db"
    return Config.model_validate({"server": server, "store": {"url": url}})


def load(config: Config) -> LoadedConfig:
    return LoadedConfig(config, {"server.admin_key": "default"}, None, ())


def test_the_key_is_made_once_for_its_owner_and_read_by_commands(tmp_path: Path) -> None:
    config = configure(tmp_path)
    assert read_admin_key(config) == ""
    first, second = add_admin_key(load(config)), add_admin_key(load(config))
    path = tmp_path / "made" / "state.db.admin_key"
    key = first.config.server.admin_key.get_secret_value()
    assert first == second
    assert (first.admin_key_path, first.origins["server.admin_key"], first.admin_key_problem) == (
        path, str(path), "",
    )  # fmt: skip
    assert read_admin_key(config) == key == path.read_text().strip()
    assert (len(key), stat.S_IMODE(path.stat().st_mode)) == (64, 0o600)
    assert key not in repr(first)


@pytest.mark.parametrize(
    "server",
    [{"admin_key": "k"}, {"admin_key": "none"}, {"host": "0.0.0.0"}, {"unix_socket": "/run/x.sock"}],
)
def test_no_key_is_made_where_one_is_configured_or_others_reach_the_address(
    server: dict[str, str], tmp_path: Path
) -> None:
    loaded = load(configure(tmp_path, **server))
    assert add_admin_key(loaded) == loaded
    assert read_admin_key(loaded.config) == server.get("admin_key", "")
    assert not (tmp_path / "made").exists()


def test_the_key_of_a_store_in_memory_is_where_the_store_would_be(tmp_path: Path) -> None:
    config = Config.model_validate({"store": {"url": "memory://"}})
    path = tmp_path / "compaction-proxy" / "state.db.admin_key"
    assert find_key_path(config, {"XDG_DATA_HOME": str(tmp_path)}) == path
    with pytest.raises(AdminKeyError, match="no data folder"):
        find_key_path(config, {})


def test_beside_a_store_that_replicas_share_no_key_is_made() -> None:
    config = Config.model_validate({"store": {"url": "redis://localhost:1"}})
    loaded = add_admin_key(load(config))
    assert (loaded.config, loaded.admin_key_path) == (config, None)
    assert "replicas share" in loaded.admin_key_problem


@pytest.mark.parametrize(("running", "keys"), [("0.0.0.0", 0), ("127.0.0.1", 1)])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_configuration_that_is_read_again_does_not_move_the_proxy_to_another_address(
    host: str, running: str, keys: int, tmp_path: Path
) -> None:
    loaded = load(configure(tmp_path, host=host))
    found = add_admin_key(loaded, running=configure(tmp_path, host=running).server)
    assert len(found.config.server.admin_key.get_secret_value()) == keys * 64
    assert len(list(tmp_path.rglob("*.admin_key"))) == keys


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("ab" * 32, 0o604, "other users can read it"),
        ("ab", 0o600, "it is damaged"),
        ("zz" * 32, 0o600, "it is damaged"),
        ("é" * 32, 0o600, "it is damaged"),
    ],
)
def test_a_file_that_holds_no_key_or_is_open_to_others_closes_the_admin_api(
    text: str, mode: int, why: str, tmp_path: Path
) -> None:
    path = find_key_path(configure(tmp_path), {})
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(mode)
    loaded = add_admin_key(load(configure(tmp_path)))
    assert loaded.config.server.admin_key.get_secret_value() == ""
    assert loaded.admin_key_problem.startswith("the proxy cannot use the key file next to the store: ")
    assert why in loaded.admin_key_problem
    assert path.read_text() == text


def test_a_key_that_another_user_has_put_there_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_admin_key(load(configure(tmp_path)))
    monkeypatch.setattr("os.geteuid", lambda: 4_242)
    assert "belongs to another user" in add_admin_key(load(configure(tmp_path))).admin_key_problem


def test_where_nothing_can_be_written_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "made").touch()
    problem = add_admin_key(load(configure(tmp_path))).admin_key_problem
    assert problem.startswith("the proxy cannot save a key next to the store: ")
