import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from compaction_proxy.core.errors import ConfigError, StoreUnavailableError
from compaction_proxy.storage.factory import (
    get_secret_path,
    get_store_path,
    load_installation_secret,
    open_store,
)
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.redis.store import RedisStore
from compaction_proxy.storage.sqlite.store import SqliteStore


def refuse(error: StoreUnavailableError) -> None:
    raise error


def test_a_path_is_relative_absolute_or_from_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    urls = ["sqlite:///state.db", "sqlite:////var/lib/state.db", "sqlite:///~/a/state.db", "memory://"]

    assert [get_store_path(url) for url in urls] == [
        Path("state.db"),
        Path("/var/lib/state.db"),
        Path("/home/someone/a/state.db"),
        None,
    ]


async def test_the_url_names_the_store() -> None:
    urls = [
        "memory://",
        "sqlite:///never-made.db",
        "redis://h",
        "valkeys+cluster://h,i",
        "redis+sentinel://h/s",
    ]
    stores = [open_store(url) for url in urls]

    assert [type(store) for store in stores] == [MemoryStore, SqliteStore, *[RedisStore] * 3]
    for store in stores:
        await store.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@host/0",
        "redisses://:hunter2@host",
        "redis+sqlite://:hunter2@host",
        "sqlite://state.db",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///directory/",
        "memory://somewhere",
        "hunter2/state.db",
        "",
    ],
)
def test_other_urls_are_config_errors_that_show_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)

    assert str(caught.value).startswith("store.url: ")
    assert "sqlite:///" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_secret_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/made/state.db"
    first = load_installation_secret(url, refuse)

    assert len(first) == 32
    assert load_installation_secret(url, refuse) == first
    path = get_secret_path(url)
    assert path == tmp_path / "made" / "state.db.secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_installations_have_different_secrets(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db", "memory://", "memory://"]

    assert len({load_installation_secret(url, refuse) for url in urls}) == 4


async def test_processes_that_ask_at_once_get_the_same_secret(tmp_path: Path) -> None:
    script = (
        "from compaction_proxy.storage.factory import load_installation_secret\n"
        f"print(load_installation_secret('sqlite:///{tmp_path}/state.db', print).hex())"
    )
    running = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        for _ in range(4)
    ]
    printed = {(await process.communicate())[0] for process in running}

    assert printed == {
        load_installation_secret(f"sqlite:///{tmp_path}/state.db", refuse).hex().encode() + b"\n"
    }


@pytest.mark.parametrize("damage", ["", "00" * 31, "not hex", "é"])
def test_a_damaged_secret_is_reported_and_left_alone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.db.secret"
    path.write_text(damage)
    told: list[StoreUnavailableError] = []

    secret = load_installation_secret(f"sqlite:///{tmp_path}/state.db", told.append)

    assert len(secret) == 32
    assert [error.reason for error in told] == ["secret-unavailable"]
    assert str(told[0]).endswith("it is damaged")  # no byte of the file, which anybody may read at /readyz
    assert path.read_text() == damage


def test_a_pipe_in_the_secrets_place_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    script = (
        "from compaction_proxy.storage.factory import load_installation_secret\n"
        f"load_installation_secret('sqlite:///{tmp_path}/state.db', lambda error: print(error.reason))"
    )
    os.mkfifo(tmp_path / "state.db.secret")

    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=20)

    assert run.stdout == b"secret-unavailable\n"


def test_a_secret_that_cannot_be_kept_lives_as_long_as_the_process(tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_bytes(b"")
    told: list[StoreUnavailableError] = []

    secret = load_installation_secret(f"sqlite:///{tmp_path}/in-the-way/state.db", told.append)

    assert len(secret) == 32
    assert [error.reason for error in told] == ["secret-unavailable"]
