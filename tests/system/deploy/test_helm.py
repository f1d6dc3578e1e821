"""The Helm chart, rendered by Helm itself; `.ci/run` fetches one where there is none."""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from compaction_proxy.cli.serve import get_drain_timeouts
from compaction_proxy.config.sections import ServerSection
from compaction_proxy.telemetry.metrics import GAUGES, to_public_name

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "compaction-proxy"
VALUES = {path.stem: path for path in sorted((ROOT / "deploy" / "helm" / "values").glob("*.yaml"))}
OLDEST = "1.30"
# Groups that are not of Kubernetes itself.
ADDED = ("monitoring.coreos.com/", "gateway.networking.k8s.io/")
# Settings that switch everything on that is off by default.
WATCHED = ("serviceMonitor.enabled=true", "prometheusRule.enabled=true", "dashboard.enabled=true")
PUBLISHED = (
    "ingress.enabled=true", "ingress.hosts[0]=proxy.example", "httpRoute.enabled=true",
    "httpRoute.parentRefs[0].name=shared",
    "networkPolicy.clients[0].namespaceSelector.matchLabels.name=ingress",
)  # fmt: skip
EVERYTHING = (
    *WATCHED, *PUBLISHED, "autoscaling.inflightRequests=20",
    "extraVolumes[0].name=ca", "extraVolumes[0].configMap.name=company-ca",
    "extraVolumeMounts[0].name=ca", "extraVolumeMounts[0].mountPath=/etc/company-ca",
    "serviceAccount.annotations.a=b", "ingress.className=nginx", "ingress.tls[0].secretName=tls",
    "ingress.annotations.a=b", "httpRoute.hostnames[0]=proxy.example", "httpRoute.annotations.a=b",
    "serviceMonitor.labels.a=b", "prometheusRule.labels.a=b", "dashboard.annotations.a=b",
    "serviceMonitor.tlsConfig.insecureSkipVerify=true",
)  # fmt: skip
HELM = os.environ.get("HELM") or shutil.which("helm") or ""


pytestmark = pytest.mark.skipif(not HELM, reason="needs helm on the PATH, or $HELM")

Object = dict[str, Any]


def find_one(objects: Iterable[Object], kind: str, name: str = "") -> Object:
    """The only object of a kind, or the one whose name ends like this."""
    [found] = [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    return found


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


def proxy_of(values: str, *settings: str) -> Object:
    [deployment] = [each for each in rendered(values, *settings) if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    found: Object = (spec.get("initContainers") or spec["containers"])[0]
    return found


def environ(container: Object) -> Mapping[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_has_no_faults_that_helm_knows(values: str) -> None:
    run = helm("lint", "--strict", str(CHART), "-f", str(VALUES[values]))
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("settings", [(), EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("values", VALUES)
def test_what_is_rendered_follows_the_schemas_of_kubernetes(values: str, settings: tuple[str, ...]) -> None:
    for found in rendered(values, *settings):
        if found["apiVersion"].startswith(ADDED):
            continue
        for version in (OLDEST, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(found, version, strict=True)


def test_what_is_added_to_kubernetes_follows_its_own_schemas(
    find_faults: Callable[[list[Object]], str],
) -> None:
    objects = [
        found for found in rendered("standalone", *EVERYTHING) if found["apiVersion"].startswith(ADDED)
    ]
    assert {found["kind"] for found in objects} == {"ServiceMonitor", "PrometheusRule", "HTTPRoute"}
    assert find_faults(objects) == ""


def test_the_schemas_of_what_is_added_see_a_misspelt_field(
    find_faults: Callable[[list[Object]], str],
) -> None:
    monitor = find_one(rendered("standalone", *EVERYTHING), "ServiceMonitor")
    assert find_faults([{**monitor, "spec": {"selectr": {}, "endpoints": []}}]).startswith("ServiceMonitor: ")


def test_each_set_of_values_gives_what_it_says() -> None:
    shared = {
        "Deployment", "Service", "ServiceAccount", "HorizontalPodAutoscaler", "PodDisruptionBudget",
        "NetworkPolicy", "Pod",
    }  # fmt: skip
    added = {"ServiceMonitor", "PrometheusRule", "ConfigMap", "Ingress", "HTTPRoute"}
    assert kinds("standalone") == shared | {"StatefulSet", "ConfigMap"}
    assert kinds("standalone", *EVERYTHING) == shared | added | {"StatefulSet"}
    assert kinds("external-redis") == shared | {"ServiceMonitor"}
    assert kinds("sidecar") == kinds("sidecar", *EVERYTHING) == {
        "Deployment", "NetworkPolicy", "ServiceAccount",
    }  # fmt: skip
    off = (
        "autoscaling.enabled=false", "podDisruptionBudget.enabled=false", "networkPolicy.enabled=false",
        "serviceAccount.create=false",
    )  # fmt: skip
    assert kinds("external-redis", *off) == {"Deployment", "Service", "ServiceMonitor", "Pod"}


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


def is_selected(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Whether a selector of labels, which is all that we use, takes these; None takes none."""
    return selector is not None and selector.get("matchLabels", {}).items() <= labels.items()


OURS = {"kubernetes.io/metadata.name": "ours"}
DNS = {"kubernetes.io/metadata.name": "kube-system"}
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
PROXY = {"app.kubernetes.io/name": "compaction-proxy", "app.kubernetes.io/instance": "demo"}
REDIS = {"app.kubernetes.io/name": "compaction-proxy-redis", "app.kubernetes.io/instance": "demo"}
CLIENT = {"compaction-proxy-client": "true"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
NOBODY = {"app.kubernetes.io/name": "anything"}

# A pod, as the labels of its namespace and its own, or an address outside the cluster.
Peer = tuple[Mapping[str, str], Mapping[str, str]] | str


def is_peer(rule: Object, peer: Peer) -> bool:
    """Whether a NetworkPolicyPeer of a policy in the namespace `OURS` takes a peer."""
    if isinstance(peer, str):
        address = ipaddress.ip_address(peer)
        block = rule.get("ipBlock")
        return (
            block is not None
            and address in ipaddress.ip_network(block["cidr"])
            and not any(address in ipaddress.ip_network(each) for each in block.get("except", ()))
        )
    namespace, labels = peer
    if "ipBlock" in rule:
        return False
    in_namespace = (
        is_selected(rule["namespaceSelector"], namespace)
        if "namespaceSelector" in rule
        else namespace == OURS
    )
    return in_namespace and ("podSelector" not in rule or is_selected(rule["podSelector"], labels))


def is_allowed(
    objects: Iterable[Object], pod: Mapping[str, str], direction: str, peer: Peer, port: object
) -> bool:
    """Whether the policies let a connection to or from a pod pass, as Kubernetes defines it."""
    policies = [
        each["spec"]
        for each in objects
        if each["kind"] == "NetworkPolicy" and is_selected(each["spec"]["podSelector"], pod)
    ]
    applying = [each for each in policies if direction in each["policyTypes"]]
    side = "from" if direction == "Ingress" else "to"
    return not applying or any(
        any(is_peer(each, peer) for each in rule[side]) and port in [each["port"] for each in rule["ports"]]
        for policy in applying
        for rule in policy.get(direction.lower()) or ()
    )


@pytest.mark.parametrize(
    ("pod", "direction", "peer", "port", "expected"),
    [
        (PROXY, "Ingress", (MONITORING, PROMETHEUS), "proxy", True),
        (PROXY, "Ingress", (OURS, CLIENT), "proxy", True),
        (PROXY, "Egress", (OURS, REDIS), 6379, True),
        (REDIS, "Ingress", (OURS, PROXY), "redis", True),
        (PROXY, "Egress", (DNS, NOBODY), 53, True),
        (PROXY, "Egress", "203.0.113.7", 443, True),
        (PROXY, "Egress", "2001:db8::7", 443, True),
        # Everything else is denied.
        (PROXY, "Ingress", (MONITORING, NOBODY), "proxy", False),
        (PROXY, "Ingress", (MONITORING, CLIENT), "proxy", False),
        (PROXY, "Ingress", (OURS, NOBODY), "proxy", False),
        (PROXY, "Ingress", (OURS, CLIENT), "other", False),
        (PROXY, "Ingress", "203.0.113.7", "proxy", False),
        (PROXY, "Egress", (OURS, NOBODY), 6379, False),
        (PROXY, "Egress", (MONITORING, REDIS), 6379, False),
        (PROXY, "Egress", (OURS, REDIS), 22, False),
        (PROXY, "Egress", "203.0.113.7", 80, False),
        (PROXY, "Egress", "203.0.113.7", 6379, False),
        (PROXY, "Egress", "169.254.169.254", 443, False),
        (PROXY, "Egress", "fd00:ec2::254", 443, False),
        (PROXY, "Egress", "fd20:ce::254", 443, False),
        (PROXY, "Egress", "fe80::1", 443, False),
        (PROXY, "Egress", "2001:db8::7", 80, False),
        (REDIS, "Ingress", (OURS, CLIENT), "redis", False),
        (REDIS, "Ingress", (MONITORING, PROMETHEUS), "redis", False),
        (REDIS, "Egress", (OURS, PROXY), 4141, False),
        (REDIS, "Egress", (DNS, NOBODY), 53, False),
        (REDIS, "Egress", "203.0.113.7", 443, False),
    ],
)
def test_with_monitoring_the_scrape_and_redis_are_allowed_and_everything_else_is_denied(
    pod: Mapping[str, str], direction: str, peer: Peer, port: object, *, expected: bool
) -> None:
    assert is_allowed(rendered("standalone", *WATCHED), pod, direction, peer, port) is expected


def test_without_monitoring_nobody_reads_the_metrics_and_a_given_peer_replaces_the_guess() -> None:
    scrape = (PROXY, "Ingress", (MONITORING, PROMETHEUS), "proxy")
    assert not is_allowed(rendered("standalone"), *scrape)
    given = "networkPolicy.monitoring[0].namespaceSelector.matchLabels.name=elsewhere"
    objects = rendered("standalone", *WATCHED, given)
    assert not is_allowed(objects, *scrape)
    assert is_allowed(objects, PROXY, "Ingress", ({"name": "elsewhere"}, NOBODY), "proxy")


def test_a_redis_of_ones_own_is_reached_at_its_port() -> None:
    assert is_allowed(rendered("external-redis"), PROXY, "Egress", "203.0.113.7", 6379)


def test_the_scrape_finds_the_service_and_the_alerts_know_its_job() -> None:
    objects = rendered("standalone", *WATCHED, "nameOverride=gate")
    monitor, service = find_one(objects, "ServiceMonitor"), find_one(objects, "Service", "demo-gate")
    assert is_selected(monitor["spec"]["selector"], service["metadata"]["labels"])
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    rules = find_one(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]
    asked = {job for rule in rules for job in re.findall(r'job="(.*?)"', rule["expr"])}
    assert asked == {job} == {"gate"}


def test_alerts_and_dashboard_are_those_of_the_monitoring_folder() -> None:
    objects = rendered("standalone", *WATCHED)
    folder = ROOT / "deploy" / "monitoring"
    alerts = yaml.safe_load((folder / "alerts.yml").read_text(encoding="utf-8"))
    assert find_one(objects, "PrometheusRule")["spec"] == alerts
    dashboard = find_one(objects, "ConfigMap", "-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = json.loads(dashboard["data"]["compaction-proxy.json"])
    path = folder / "grafana" / "dashboards" / "compaction-proxy.json"
    assert shown == json.loads(path.read_text(encoding="utf-8"))


def test_the_packed_chart_holds_alerts_and_dashboard(tmp_path: Path) -> None:
    packed = helm("package", str(CHART), "--destination", str(tmp_path))
    assert packed.returncode == 0, packed.stderr
    [archive] = tmp_path.iterdir()
    with tarfile.open(archive) as files:
        names = {each.name: each.isfile() for each in files.getmembers()}
    for name in ("monitoring/alerts.yml", "monitoring/dashboard.json", "README.md", "values.schema.json"):
        assert names[f"compaction-proxy/{name}"]


def test_what_publishes_the_proxy_leads_to_its_service_and_shows_nothing_that_is_for_operators() -> None:
    objects = rendered("standalone", *PUBLISHED)
    service = find_one(objects, "Service", "demo-compaction-proxy")
    [rule] = find_one(objects, "Ingress")["spec"]["rules"]
    [path] = rule["http"]["paths"]
    assert (rule["host"], path["path"], path["pathType"]) == ("proxy.example", "/v1", "Prefix")
    target = path["backend"]["service"]
    assert target == {
        "name": service["metadata"]["name"],
        "port": {"name": service["spec"]["ports"][0]["name"]},
    }
    [route] = find_one(objects, "HTTPRoute")["spec"]["rules"]
    assert route["backendRefs"] == [
        {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    ]
    assert [match["path"]["value"] for match in route["matches"]] == ["/v1"]
    assert is_allowed(objects, PROXY, "Ingress", ({"name": "ingress"}, NOBODY), "proxy")


@pytest.mark.parametrize("setting", ["ingress", "httpRoute"])
def test_a_published_proxy_that_its_own_policy_hides_is_refused(setting: str) -> None:
    given = [each for each in PUBLISHED if each.startswith(setting)]
    arguments = [part for each in given for part in ("--set", each)]
    run = helm("template", "demo", str(CHART), *arguments)
    assert run.returncode != 0
    assert "networkPolicy.clients: name the pods" in run.stderr
    allowed = helm("template", "demo", str(CHART), *arguments, "--set", "networkPolicy.enabled=false")
    assert allowed.returncode == 0, allowed.stderr


@pytest.mark.parametrize("values", VALUES)
def test_a_certificate_authority_of_ones_own_reaches_the_proxy(values: str) -> None:
    settings = (*EVERYTHING, "extraEnv[0].name=SSL_CERT_FILE", "extraEnv[0].value=/etc/company-ca/ca.crt")
    [deployment] = [each for each in rendered(values, *settings) if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    proxy = (spec.get("initContainers") or spec["containers"])[0]
    assert {"name": "ca", "mountPath": "/etc/company-ca"} in proxy["volumeMounts"]
    assert {"name": "ca", "configMap": {"name": "company-ca"}} in spec["volumes"]
    assert environ(proxy)["SSL_CERT_FILE"] == "/etc/company-ca/ca.crt"


@pytest.mark.parametrize("values", VALUES)
def test_pods_run_as_the_service_account_that_is_made_or_named(values: str) -> None:
    def read_name(*settings: str) -> str:
        [deployment] = [each for each in rendered(values, *settings) if each["kind"] == "Deployment"]
        return str(deployment["spec"]["template"]["spec"]["serviceAccountName"])

    assert read_name() == find_one(rendered(values), "ServiceAccount")["metadata"]["name"]
    assert read_name("serviceAccount.name=mine") == "mine"
    assert read_name("serviceAccount.create=false") == "default"
    assert read_name("serviceAccount.create=false", "serviceAccount.name=theirs") == "theirs"


def test_names_are_overridden_everywhere() -> None:
    names = {
        each["metadata"]["name"] for each in rendered("standalone", *EVERYTHING, "fullnameOverride=gate")
    }
    assert names == {"gate", "gate-redis", "gate-dashboard", "gate-test"}
    [store] = [
        each["value"]
        for each in proxy_of("standalone", "fullnameOverride=gate")["env"]
        if each["name"] == "COMPACTION_PROXY__STORE__URL"
    ]
    assert "@gate-redis:6379/" in store
    run = helm("template", "demo", str(CHART), "--set", "nameOverride=gate")
    assert "name: demo-gate\n" in run.stdout
    assert "app.kubernetes.io/name: gate-redis" in run.stdout


def test_probes_follow_the_base_path_and_https() -> None:
    settings = ("config.server.base_path=/compaction", "config.server.tls_certificate=/tls/tls.crt")
    proxy = proxy_of("standalone", *settings)
    probes = [proxy[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {(probe["scheme"], probe["port"]) for probe in probes} == {("HTTPS", "proxy")}
    assert {probe["path"] for probe in probes} == {"/compaction/readyz", "/compaction/livez"}
    objects = rendered("standalone", *settings, *WATCHED)
    [endpoint] = find_one(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["path"]) == ("https", "/compaction/metrics")
    url = "https://demo-compaction-proxy:4141/compaction"
    assert find_one(objects, "Pod")["spec"]["containers"][0]["args"] == ["health", "--url", url]


def test_the_test_pod_may_reach_the_proxy_and_is_none_of_its_pods() -> None:
    objects = rendered("standalone")
    pod = find_one(objects, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    labels = pod["metadata"]["labels"]
    assert is_allowed(objects, PROXY, "Ingress", (OURS, labels), "proxy")
    assert not is_selected({"matchLabels": PROXY}, labels)
    [container] = pod["spec"]["containers"]
    service = find_one(objects, "Service", "demo-compaction-proxy")
    port = service["spec"]["ports"][0]["port"]
    assert container["args"] == ["health", "--url", f"http://demo-compaction-proxy:{port}"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_autoscaler_may_go_by_requests_in_flight() -> None:
    def list_metrics(*settings: str) -> list[Object]:
        found: list[Object] = find_one(rendered("standalone", *settings), "HorizontalPodAutoscaler")["spec"][
            "metrics"
        ]
        return found

    assert [each["type"] for each in list_metrics()] == ["Resource"]
    *_, added = list_metrics("autoscaling.inflightRequests=20")
    assert added["pods"]["metric"]["name"] in {to_public_name(name) for name in GAUGES}
    assert added["pods"]["target"] == {"type": "AverageValue", "averageValue": "20"}


def test_an_image_may_be_fixed_by_its_digest() -> None:
    digest = f"sha256:{'0' * 64}"
    assert proxy_of("standalone", f"image.digest={digest}")["image"] == f"compaction-proxy:0.1.0@{digest}"


def list_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values that have no values of their own, by their whole names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        is_group = isinstance(value, dict) and value and f"{prefix}{name}" not in MAPPINGS
        found |= list_values(value, f"{prefix}{name}.") if is_group else {f"{prefix}{name}": value}
    return found


# Values that are mappings of the user's own keys.
MAPPINGS = {
    "networkPolicy.clientLabels", "dashboard.labels", "httpRoute.timeouts", "resources", "redis.resources",
    "app.resources", "sidecar.resources",
}  # fmt: skip


def test_the_readme_lists_every_value_with_its_default() -> None:
    values = list_values(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))
    rows = re.findall(r"(?m)^\| `([\w.]+)` \| `(.*?)` \|", (CHART / "README.md").read_text(encoding="utf-8"))
    assert {name: yaml.safe_load(default) for name, default in rows} == values
