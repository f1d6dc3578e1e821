"""A request that fits but for the output it asks for: less is asked for, where that is allowed."""

import json

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.cli.demo.provider import AGENT_MODEL, DemoProvider, DemoProviderSettings
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded
from compaction_proxy.providers.tokenizers import TiktokenCounter

COUNTER = TiktokenCounter(print)
WINDOW = 2_048
BODY = {
    "model": AGENT_MODEL,
    "messages": [{"role": "user", "content": "a word of it " * 150}],
    "max_tokens": 1_900,
}


@pytest.mark.parametrize("allowed", [True, False])
async def test_only_the_output_is_lowered_and_only_where_that_is_allowed(*, allowed: bool) -> None:
    provider = DemoProvider(DemoProviderSettings(counter=COUNTER, window=WINDOW))
    async with serve_embedded(provider) as upstream:
        config = Config.model_validate(
            {
                "upstream": {"base_url": f"{upstream}/v1", "lower_max_tokens": allowed},
                "store": {"url": "memory://"},
            }
        )
        async with serve_embedded(create_app(config)) as url, httpx.AsyncClient(base_url=url) as client:
            answer = await client.post("/v1/chat/completions", json=BODY)

    asked = [json.loads(seen.body) for seen in provider.log]
    assert asked[0] == BODY
    if allowed:
        assert answer.status_code == 200
        assert {**asked[-1], "max_tokens": 1_900} == BODY
        assert 1_024 <= asked[-1]["max_tokens"] < 1_900
    else:
        assert (answer.status_code, len(asked)) == (400, 1)
