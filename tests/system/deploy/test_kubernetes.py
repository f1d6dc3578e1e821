import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from compaction_proxy.cli.serve import get_drain_timeouts
from compaction_proxy.config.sections import ServerSection

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
OLDEST = "1.30"  # preStop's `sleep`; native sidecars are older
# After SIGTERM: the time in which requests are still accepted, and what running answers get, in seconds.
PATIENCE = get_drain_timeouts(ServerSection(host="0.0.0.0"))
TO_END_S = PATIENCE.accept_s + PATIENCE.drain_s

Object = dict[str, Any]


def objects(folder: str) -> list[Object]:
    """What kustomize would apply, without its changes."""
    names = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    texts = [(FOLDER / folder / name).read_text(encoding="utf-8") for name in names]
    return [found for text in texts for found in yaml.safe_load_all(text)]


def one(folder: str, kind: str, name: str) -> Object:
    (found,) = [each for each in objects(folder) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod(folder: str, name: str) -> Object:
    spec: Object = one(folder, "Deployment", name)["spec"]["template"]["spec"]
    return spec


SIDECAR = pod("sidecar", "app")["initContainers"][0]
STANDALONE = pod("standalone", "compaction-proxy")["containers"][0]
PROXIES = pytest.mark.parametrize("container", [SIDECAR, STANDALONE], ids=["sidecar", "standalone"])


def environment(container: Object, **known: str) -> dict[str, str]:
    """The variables that a container gets, those from secrets as in `known`."""
    environ = dict(known)
    for each in container["env"]:
        if "value" in each:
            value = each["value"]
            for name, secret in known.items():
                value = value.replace(f"$({name})", secret)
            environ[each["name"]] = value
    return environ


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_the_manifests_follow_the_schemas_of_kubernetes(path: Path) -> None:
    for found in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if found["kind"] == "Kustomization":
            assert [name for name in found["resources"] if not (path.parent / name).exists()] == []
            continue
        for version in (OLDEST, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(found, version, strict=True)


def test_the_validation_sees_a_misspelt_field() -> None:
    service = one("standalone", "Service", "compaction-proxy")
    service["spec"]["selectr"] = service["spec"].pop("selector")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, OLDEST, strict=True)


def test_the_route_of_the_gateway_api_follows_its_schema_and_leads_to_the_service(find_faults: Any) -> None:
    path = ROOT / "deploy" / "gateway-api" / "httproute.yaml"
    route = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert find_faults([route]) == ""
    service = one("standalone", "Service", "compaction-proxy")
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    ]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1", "/readyz"]


@pytest.mark.parametrize("folder", ["sidecar", "standalone"])
def test_every_container_has_no_more_rights_than_it_needs(folder: str) -> None:
    specs = [each["spec"]["template"]["spec"] for each in objects(folder) if "template" in each["spec"]]
    assert specs
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_no_secret_is_in_the_repository() -> None:
    assert [
        each for folder in ("sidecar", "standalone") for each in objects(folder) if each["kind"] == "Secret"
    ] == []
    example = yaml.safe_load((FOLDER / "standalone" / "secret.example.yaml").read_text(encoding="utf-8"))
    assert set(example["stringData"].values()) == {"replace-me"}
    referred = {each["valueFrom"]["secretKeyRef"]["key"] for each in STANDALONE["env"] if "valueFrom" in each}
    mounted = {item["key"] for item in pod("standalone", "compaction-proxy")["volumes"][0]["secret"]["items"]}
    assert referred | mounted == set(example["stringData"])


@pytest.mark.parametrize(("folder", "name"), [("sidecar", "app"), ("standalone", "compaction-proxy")])
def test_running_answers_may_end_before_a_pod_is_killed(folder: str, name: str) -> None:
    spec = pod(folder, name)
    proxy = (spec.get("initContainers") or spec["containers"])[0]
    waited = proxy["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > waited + TO_END_S


def test_the_sidecar_is_a_native_one_and_the_app_is_told_nothing_but_its_address() -> None:
    assert SIDECAR["restartPolicy"] == "Always"
    assert SIDECAR["ports"] == [{"name": "proxy", "containerPort": 4141}]
    (app,) = pod("sidecar", "app")["containers"]
    assert environment(app) == {"OPENAI_BASE_URL": "http://127.0.0.1:4141/v1"}


@PROXIES
def test_the_proxies_know_their_settings(container: Object, configured: Any) -> None:
    config = configured(environment(container, REDIS_PASSWORD="pw"))
    assert config.upstream.base_url == "https://api.openai.com/v1"


def test_the_replicas_share_a_store_that_is_a_service() -> None:
    store = environment(STANDALONE, REDIS_PASSWORD="pw")["COMPACTION_PROXY__STORE__URL"]
    service = one("standalone", "Service", "compaction-proxy-redis")
    assert store == f"redis://:pw@{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/0"


def test_what_selects_pods_finds_them() -> None:
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in objects("standalone")
        if "template" in each["spec"]
    }
    for each in objects("standalone"):
        selector = each["spec"].get("podSelector") or each["spec"].get("selector")
        if selector:
            assert selector.get("matchLabels", selector) == labels[each["metadata"]["name"]], each["kind"]
    assert one("standalone", "HorizontalPodAutoscaler", "compaction-proxy")["spec"]["minReplicas"] >= 2


@contextmanager
def serving(environ: dict[str, str], folder: Path) -> Iterator[str]:
    """The base URL of a proxy with a container's settings; `/data` is a folder."""
    placed = {name: value.replace("/data/", f"{folder}/") for name, value in environ.items()}
    with subprocess.Popen(
        [sys.executable, "-m", "compaction_proxy", "serve", "--port", "0", "--host", "127.0.0.1"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **placed},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=100) == 0
        finally:
            process.kill()


def test_the_sidecars_probes_are_answered(tmp_path: Path) -> None:
    probes = [SIDECAR[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert [
        STANDALONE[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")
    ] == probes
    assert {probe["port"] for probe in probes} == {"proxy"}
    with (
        serving(environment(SIDECAR), tmp_path) as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        for probe in probes:
            answer = client.get(probe["path"], headers={"user-agent": "kube-probe/1.30"})
            assert answer.status_code == 200, probe
