"""The Helm chart, rendered by Helm itself; `.ci/run` fetches one where there is none."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from compaction_proxy.cli.serve import get_drain_timeouts
from compaction_proxy.config.sections import ServerSection

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "compaction-proxy"
VALUES = {path.stem: path for path in sorted((ROOT / "deploy" / "helm" / "values").glob("*.yaml"))}
OLDEST = "1.30"
NOT_BUILT_IN = "monitoring.coreos.com/v1"
HELM = os.environ.get("HELM") or shutil.which("helm") or ""


pytestmark = pytest.mark.skipif(not HELM, reason="needs helm on the PATH, or $HELM")

Object = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=False)


@cache
def rendered(values: str, *settings: str) -> tuple[Object, ...]:
    """What Helm would apply, of one of our values files and settings like `mode=sidecar`."""
    given = [part for each in settings for part in ("--set", each)]
    run = helm("template", "demo", str(CHART), "-f", str(VALUES[values]), *given)
    assert run.returncode == 0, run.stderr
    return tuple(found for found in yaml.safe_load_all(run.stdout) if found)


def kinds(values: str, *settings: str) -> set[str]:
    return {each["kind"] for each in rendered(values, *settings)}


def templates(values: str) -> list[Object]:
    return [{"spec": found} for each in rendered(values) if (found := each.get("spec", {}).get("template"))]


def pods(values: str) -> list[Object]:
    return [each["spec"]["spec"] for each in templates(values)]


def proxy_of(values: str) -> Object:
    [deployment] = [each for each in rendered(values) if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    found: Object = (spec.get("initContainers") or spec["containers"])[0]
    return found


def environ(container: Object) -> Mapping[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_has_no_faults_that_helm_knows(values: str) -> None:
    run = helm("lint", "--strict", str(CHART), "-f", str(VALUES[values]))
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("values", VALUES)
def test_what_is_rendered_follows_the_schemas_of_kubernetes(values: str) -> None:
    for found in rendered(values):
        if found["apiVersion"] == NOT_BUILT_IN:
            continue
        for version in (OLDEST, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(found, version, strict=True)


def test_each_set_of_values_gives_what_it_says() -> None:
    shared = {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"}
    assert kinds("standalone") == shared | {"StatefulSet", "ConfigMap"}
    assert kinds("external-redis") == shared | {"ServiceMonitor"}
    assert kinds("sidecar") == {"Deployment", "NetworkPolicy"}
    off = ("autoscaling.enabled=false", "podDisruptionBudget.enabled=false", "networkPolicy.enabled=false")
    assert kinds("external-redis", *off) == {"Deployment", "Service", "ServiceMonitor"}


def test_what_selects_pods_finds_them() -> None:
    for values in VALUES:
        labels = [each["spec"]["metadata"]["labels"] for each in templates(values)]
        for each in rendered(values):
            spec = each.get("spec", {})
            wanted = spec.get("selector") or spec.get("podSelector") or {}
            wanted = wanted.get("matchLabels", wanted)
            if wanted and each["kind"] != "ServiceMonitor":
                assert any(wanted.items() <= found.items() for found in labels), each["kind"]


@pytest.mark.parametrize("values", VALUES)
def test_no_container_has_more_rights_than_it_needs(values: str) -> None:
    assert pods(values)
    for spec in pods(values):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("values", VALUES)
def test_running_answers_may_end_before_a_pod_is_killed(values: str) -> None:
    container = proxy_of(values)
    told = environ(container)
    waits = get_drain_timeouts(
        ServerSection(
            host="0.0.0.0",
            accept_grace_s=int(told["COMPACTION_PROXY__SERVER__ACCEPT_GRACE_S"]),
            drain_s=int(told["COMPACTION_PROXY__SERVER__DRAIN_S"]),
        )
    )
    [spec] = [
        each for each in pods(values) if container in [*each["containers"], *each.get("initContainers", ())]
    ]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > before + waits.accept_s + waits.drain_s


@pytest.mark.parametrize("values", VALUES)
def test_the_proxies_know_their_settings(values: str, configured: Any) -> None:
    told = dict(environ(proxy_of(values)))
    told.pop("COMPACTION_PROXY_CONFIG", None)  # the file is the chart's own values, read below
    config = configured(told)
    assert config.upstream.base_url == "https://api.openai.com/v1"


def test_the_configuration_of_the_values_becomes_the_proxy_s_file(configured: Any, tmp_path: Path) -> None:
    [found] = [each for each in rendered("standalone") if each["kind"] == "ConfigMap"]
    file = tmp_path / "config.yaml"
    file.write_text(found["data"]["config.yaml"], encoding="utf-8")
    config = configured({"COMPACTION_PROXY_CONFIG": str(file)})
    assert (config.compaction.strategy, config.models["my-local-*"].window) == ("anchored", 32_768)


def test_the_sidecar_is_a_native_one_and_the_app_is_told_its_address() -> None:
    [spec] = pods("sidecar")
    assert spec["initContainers"][0]["restartPolicy"] == "Always"
    assert environ(spec["containers"][0])["OPENAI_BASE_URL"] == "http://127.0.0.1:4141/v1"


def test_without_a_redis_nothing_is_rendered_but_a_reason() -> None:
    run = helm("template", "demo", str(CHART), "--set", "redis.enabled=false")
    assert run.returncode != 0
    assert "externalRedis.urlSecret.name: name the Secret" in run.stderr


@pytest.mark.parametrize("setting", ["mode=both", "replicas=3", "service.port=0", "upstream.baseUrl=openai"])
def test_values_that_make_no_sense_are_refused(setting: str) -> None:
    run = helm("template", "demo", str(CHART), "--set", setting)
    assert run.returncode != 0
    assert "don't meet the specifications of the schema" in run.stderr


def test_every_value_has_a_place_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values.keys() <= schema["properties"].keys()
