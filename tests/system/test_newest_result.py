"""A tool result that the model has not seen yet reaches it whole, as long as a round can make room for it."""

from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Received, Reply, run_proxy
from tests.system.test_output_reserve import WIRES, Wire, prose, texts


def answer(request: Received) -> Reply:
    return WIRES["messages" if request.path.endswith("/messages") else "chat"].answer(request)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_large_new_result_is_whole_below_and_above_the_trigger(wire: Wire, tmp_path: Path) -> None:
    provider = Provider(answer)
    config = {"models": {"*": {"window": 32_000}}, "summary": {"model": "none"}}
    messages: list[Any] = [{"role": "user", "content": prose(300, "task")}]
    statuses, lost = set(), []
    try:
        with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
            for step in range(12):
                text = prose(6_500, f"file-{step}")
                messages += wire.unit(step, text)
                reply = client.post(wire.path, json=wire.request("m-32k", 1_000, 3_000, messages))
                assert reply.status_code == 200, reply.text
                statuses.add(reply.headers["x-compaction-status"])
                lost += [] if text in texts(provider.received[-1].json()) else [step]
    finally:
        provider.close()
    assert lost == []
    assert "applied" in statuses
