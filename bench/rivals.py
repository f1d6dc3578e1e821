"""Other proxies for conversations, at pinned versions, each in an environment of its own.

They are set so that they do here what ours does: relay a conversation that is far below their thresholds.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A command whose first word is a program of the environment, and environment variables.
Configured = tuple[list[str], dict[str, str]]
INSTALL_S = 600.0
_WINDOW = 2_000_000


@dataclass(frozen=True, slots=True)
class Rival:
    """Another proxy.

    Attributes:
        name: As the tables say it.
        requirement: What to install.
        configured: How to run it, for a folder, the upstream's URL and a port; may write into the folder.
    """

    name: str
    requirement: str
    configured: Callable[[Path, str, int], Configured]


def _awecompress(folder: Path, upstream: str, port: int) -> Configured:
    settings = folder / "config.json"
    settings.write_text(json.dumps({"upstream": upstream, "thresholdTokens": _WINDOW}))
    command = ["awecompress", "serve", "--port", str(port), "--config", str(settings)]
    return command, {"HOME": str(folder), "AWECOMPRESS_CONFIG_DIR": str(folder)}


def _cliffcompaction(folder: Path, upstream: str, port: int) -> Configured:
    command = ["cliff", "serve", "--port", str(port), "--threshold", str(_WINDOW)]
    return [*command, "--openai-upstream", upstream], {"HOME": str(folder)}


def _context_guardian(folder: Path, upstream: str, port: int) -> Configured:
    return ["context-guardian"], {
        "HOME": str(folder),
        "GUARDIAN_PORT": str(port),
        "GUARDIAN_UPSTREAM_URL": upstream + "/v1",
        "GUARDIAN_NUM_CTX": str(_WINDOW),
    }


def _litellm(folder: Path, upstream: str, port: int) -> Configured:
    parameters = {"model": "openai/*", "api_base": upstream + "/v1", "api_key": "sk-bench"}
    settings = folder / "config.yaml"  # JSON is YAML
    models = [{"model_name": "*", "litellm_params": parameters}]
    # Spares it a look at each client's key.
    general = {"dangerously_permit_weak_or_unset_master_key": True}
    settings.write_text(json.dumps({"model_list": models, "general_settings": general}))
    command = ["litellm", "--config", str(settings), "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "HOME": str(folder)}
    return [*command, "--num_workers", "1"], quiet


RIVALS = (
    Rival("awecompress 0.2.0", "awecompress==0.2.0", _awecompress),
    Rival("cliffcompaction 0.1.0", "cliffcompaction==0.1.0", _cliffcompaction),
    Rival("context-guardian 0.12.0", "context-guardian==0.12.0", _context_guardian),
    Rival("LiteLLM 1.106.2", "litellm[proxy]==1.106.2", _litellm),
)


def cache() -> Path:
    """Where environments of rivals are kept from run to run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "compaction-proxy-bench"


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    if ended.returncode:
        raise RuntimeError(f"cannot be installed: {ended.stderr.strip()[-300:]}")


def installed_in(environments: Path, rival: Rival) -> Path:
    """The folder of a rival's programs; it is installed there the first time.

    Raises:
        RuntimeError: It cannot be installed.
    """
    home = environments / rival.name.replace(" ", "-")
    finished = home / "installed"
    if not finished.exists():
        uv = shutil.which("uv")
        if uv is None:
            raise RuntimeError("cannot be installed: there is no uv on the path")
        shutil.rmtree(home, ignore_errors=True)
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(home)])
        _run([uv, "pip", "install", "--quiet", "--python", str(home / "bin/python"), rival.requirement])
        finished.touch()
    return home / "bin"
