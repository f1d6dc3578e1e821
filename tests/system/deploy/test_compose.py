import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.cli.serve import get_drain_timeouts
from compaction_proxy.config.sections import ServerSection

ROOT = Path(__file__).resolve().parents[3]
FILES = ("docker-compose.yml", "deploy/compose/secrets.yml")
# After SIGTERM: the time in which requests are still accepted, and what running answers get, in seconds.
PATIENCE = get_drain_timeouts(ServerSection(host="0.0.0.0"))
TO_END_S = PATIENCE.accept_s + PATIENCE.drain_s


@pytest.fixture
def services(documents: Any) -> dict[str, dict[str, Any]]:
    (document,) = documents(FILES[0])
    found: dict[str, dict[str, Any]] = document["services"]
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_files_follow_the_compose_specification(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(ROOT / name),
    ]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_it_starts_with_no_variable_set_and_no_file_made(documents: Any) -> None:
    (document,) = documents(FILES[0])
    text = (ROOT / FILES[0]).read_text(encoding="utf-8")
    assert set(re.findall(r"\$\{\w+(.{2})", text)) == {":-"}
    assert re.findall(r"\$[^{]", text) == []
    assert document.keys() & {"secrets", "configs", "version"} == set()
    assert not [name for name, service in document["services"].items() if "env_file" in service]
    started = {name for name, service in document["services"].items() if "profiles" not in service}
    assert started == {"proxy", "redis"}


def test_every_container_has_no_more_rights_than_it_needs(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["tmpfs"]
        assert service.keys() & {"privileged", "cap_add", "network_mode", "pid", "devices"} == set()


def test_no_container_takes_all_memory_or_fills_the_disk_with_its_log(
    services: dict[str, dict[str, Any]],
) -> None:
    for service in services.values():
        assert service["mem_limit"]
        assert service["pids_limit"] == 256
        assert service["logging"] == {
            "driver": "json-file", "options": {"max-size": "10m", "max-file": "5"},
        }  # fmt: skip
    used = services["redis"]["command"][services["redis"]["command"].index("--maxmemory") + 1]
    assert (used, services["redis"]["mem_limit"]) == ("512mb", "1g")


def test_nothing_is_published_to_other_machines(services: dict[str, dict[str, Any]], documents: Any) -> None:
    ports = [port for service in services.values() for port in service.get("ports", ())]
    published = {port.rpartition(":")[0] for port in ports}
    assert published == {f"127.0.0.1:{port}" for port in (4141, 4142, 9090, 3000)}
    assert services["redis"]["networks"] == ["store"]
    assert documents(FILES[0])[0]["networks"]["store"] == {"internal": True}


def test_every_image_is_ours_or_fixed_by_a_digest(services: dict[str, dict[str, Any]]) -> None:
    images = {service["image"] for service in services.values() if "image" in service}
    assert {re.sub(r":[v\d][\w.-]*@sha256:[0-9a-f]{64}$", "", image) for image in images} == {
        "compaction-proxy:0.1.0", "valkey/valkey", "prom/prometheus", "grafana/grafana",
    }  # fmt: skip
    assert all((ROOT / service["build"]).is_dir() for service in services.values() if "build" in service)


def test_one_image_has_one_digest_wherever_it_is_named() -> None:
    deployed = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    places = [ROOT / "Dockerfile", ROOT / "docker-compose.yml", *deployed]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in places]
    named = {found for text in texts for found in re.findall(r"[\w/]+:[\w.-]+@sha256:[0-9a-f]{64}", text)}
    repositories = [each.partition(":")[0] for each in named]
    assert len(set(repositories)) == len(repositories) == 4
    assert set(repositories) == {"python", "valkey/valkey", "prom/prometheus", "grafana/grafana"}


def test_the_proxy_waits_for_its_store_and_apps_wait_for_the_proxy(
    services: dict[str, dict[str, Any]],
) -> None:
    waits = {name: service.get("depends_on") for name, service in services.items()}
    healthy = {"condition": "service_healthy"}
    assert waits == {
        "redis": None,
        "proxy": {"redis": healthy},
        "app": {"proxy": healthy},
        "demo-provider": None,
        "demo-proxy": {"demo-provider": healthy},
        "demo-app": {"demo-proxy": healthy},
        "prometheus": {"proxy": healthy},
        "grafana": {"prometheus": healthy},
    }
    needed = {name for waiting in waits.values() for name in waiting or ()}
    assert [name for name in needed if "test" not in services[name]["healthcheck"]] == []


def test_running_answers_may_end_before_a_container_is_killed(services: dict[str, dict[str, Any]]) -> None:
    for name in ("proxy", "demo-proxy"):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > TO_END_S


def test_the_proxies_know_their_settings(services: dict[str, dict[str, Any]], configured: Any) -> None:
    environ = services["proxy"]["environment"]
    assert environ["COMPACTION_PROXY__STORE__URL"] == "redis://redis:6379/0"
    default = re.sub(r"\$\{\w+:-(.*)\}", r"\1", environ["COMPACTION_PROXY__UPSTREAM__BASE_URL"])
    config = configured(environ | {"COMPACTION_PROXY__UPSTREAM__BASE_URL": default})
    assert config.upstream.base_url == "https://api.openai.com/v1"
    assert config.upstream.api_key.get_secret_value() == ""
    demo = configured(services["demo-proxy"]["environment"])
    assert (demo.summary.model, demo.models["demo-*"].window) == ("demo-summary", 8192)


def test_the_secrets_are_files_that_the_proxy_reads(documents: Any, configured: Any) -> None:
    (document,) = documents(FILES[1])
    service = document["services"]["proxy"]
    config = configured(service["environment"])
    secrets = (config.server.admin_key, config.server.secret, config.upstream.api_key)
    assert [secret.get_secret_value() for secret in secrets] == ["secret"] * 3
    read = {value.removeprefix("/run/secrets/") for value in service["environment"].values()}
    assert read == set(service["secrets"]) == set(document["secrets"])
