"""The memory limits of the deployment files leave room for the largest body."""

import re
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.config.sections import ServerSection
from compaction_proxy.gateway.body_budget import compute_default_budget

ROOT = Path(__file__).resolve().parents[3]
UNITS = {"g": 1024**3, "G": 1024**3, "Gi": 1024**3, "Mi": 1024**2}
CHART = "deploy/helm/compaction-proxy/values.yaml"
KUBERNETES = "deploy/kubernetes/{}/deployment.yaml"


def limits(documents: Any) -> dict[str, str]:
    """The limit of each proxy as its file writes it."""
    (chart,) = documents(CHART)
    (compose,) = documents("docker-compose.yml")
    standalone = documents(KUBERNETES.format("standalone"))[0]["spec"]["template"]["spec"]["containers"][0]
    sidecar = documents(KUBERNETES.format("sidecar"))[0]["spec"]["template"]["spec"]["initContainers"][0]
    unit = (ROOT / "deploy/systemd/compaction-proxy.service").read_text(encoding="utf-8")
    (systemd,) = re.findall(r"^MemoryMax=(.*)$", unit, re.MULTILINE)
    return {
        "compose": compose["services"]["proxy"]["mem_limit"],
        "systemd": systemd,
        "standalone": standalone["resources"]["limits"]["memory"],
        "sidecar": sidecar["resources"]["limits"]["memory"],
        "chart": chart["resources"]["limits"]["memory"],
        "chart's sidecar": chart["sidecar"]["resources"]["limits"]["memory"],
    }


@pytest.mark.parametrize("name", ["compose", "systemd", "standalone", "sidecar", "chart", "chart's sidecar"])
def test_the_default_budget_of_bodies_takes_the_largest_body(name: str, documents: Any) -> None:
    size, unit = re.fullmatch(r"(\d+)([A-Za-z]+)", limits(documents)[name]).groups()  # type: ignore[union-attr]
    budget = compute_default_budget(int(size) * UNITS[unit], None, ServerSection().workers)
    assert budget >= ServerSection().max_body_bytes
