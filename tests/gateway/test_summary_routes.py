from typing import Any

import pytest
from pydantic import SecretStr

from compaction_proxy.compaction.summary_request import SummaryRoute
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.config.sections import SummarySection, UpstreamSection
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.summary_routes import build_summary_routes
from compaction_proxy.gateway.upstream import Upstream
from compaction_proxy.wires.registry import WIRES

AZURE = "/openai/deployments/{}/chat/completions"


def routes(
    path: str,
    summary: SummarySection,
    query: bytes = b"",
    *,
    strategy: str = "anchored",
    base_url: str = "https://up.example",
) -> tuple[SummaryRoute, ...]:
    config = Config(upstream=UpstreamSection(base_url=base_url), summary=summary)
    upstream = Upstream(base_url, "", "0123456789abcdef", NativeEngine(), 1, 1)
    scope = {"raw_path": path.encode(), "query_string": query, "headers": []}
    policy = STRATEGIES[strategy]
    return build_summary_routes(config, get_model_settings(config, "chat"), policy, upstream, scope, "chat")


def urls(path: str, summary: SummarySection, query: bytes = b"") -> list[str]:
    return [route.url for route in routes(path, summary, query)]


@pytest.mark.parametrize(
    ("strategy", "model", "asked"),
    [
        ("anchored", None, ["gpt-5.4-mini", "chat"]),
        ("anchored", "same", ["chat"]),
        ("anchored", "small", ["small"]),
        ("anchored", "none", []),
        ("full", None, ["chat"]),
        ("full", "small", ["small"]),
        ("prune", "small", []),
    ],
)
def test_who_is_asked_is_configured_or_the_strategy_s_wish(
    strategy: str, model: str | None, asked: list[str]
) -> None:
    summary = SummarySection(model=model)
    found = routes("/v1/chat/completions", summary, strategy=strategy, base_url="https://api.openai.com/v1")
    assert [route.model for route in found] == asked


@pytest.mark.parametrize(
    ("model", "deployed"), [("small", "small"), ("same", "chat"), (None, "chat"), ("a/b c", "a%2Fb%20c")]
)
def test_where_the_path_names_the_model_it_names_the_summary_model(model: str | None, deployed: str) -> None:
    found = urls(AZURE.format("chat"), SummarySection(model=model), b"api-version=1")
    assert found == ["https://up.example" + AZURE.format(deployed) + "?api-version=1"]


def test_any_other_path_is_the_client_s_own() -> None:
    found = urls("/api%2Fx/v1/chat/completions", SummarySection(model="small"), b"a=%2F")
    assert found == ["https://up.example/api%2Fx/v1/chat/completions?a=%2F"]


def test_another_provider_has_its_own_path() -> None:
    summary = SummarySection(model="small", base_url="https://cheap.example/v1/", api_key=SecretStr("k"))
    assert urls(AZURE.format("chat"), summary, b"api-version=1") == [
        "https://cheap.example/v1/chat/completions"
    ]


@pytest.mark.parametrize(
    ("upstream_url", "shown"),
    [
        ("https://up.example/v1", {"authorization": "Bearer own"}),
        ("https://other.example", {"x-api-key": "c"}),
    ],
)
def test_a_key_for_summaries_is_not_shown_to_the_provider_of_another_wire(
    upstream_url: str, shown: dict[str, str]
) -> None:
    summary = SummarySection(model="small", api_key=SecretStr("own"))
    config = Config(upstream=UpstreamSection(base_url="https://up.example"), summary=summary)
    upstream = Upstream(upstream_url, "", "0123456789abcdef", NativeEngine(), 1, 1)
    scope = {
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"x-api-key", b"c"), (b"cookie", b"c")],
    }
    settings = get_model_settings(config, "chat")
    (route,) = build_summary_routes(config, settings, STRATEGIES["anchored"], upstream, scope, "chat")
    assert route.headers == {**shown, "x-compaction-hop": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("given", "wire", "expected"),
    [
        ({"summary": {"base_url": "https://api.openai.com/v1"}}, "chat", ["gpt-5.4-mini", "asked"]),
        ({"summary": {"base_url": "https://api.openai.com/v1"}}, "messages", []),
        ({"summary": {"model": "gpt-mini"}}, "chat", ["gpt-mini"]),
        ({"summary": {"model": "gpt-mini"}}, "messages", ["claude-haiku-4-5", "asked"]),
        ({"summary": {"model": "same"}}, "messages", ["asked"]),
        ({"summary": {"model": "none"}}, "messages", []),
    ],
)
def test_a_wire_with_a_provider_of_its_own_asks_that_one(
    given: dict[str, Any], wire: str, expected: list[str]
) -> None:
    config = Config.model_validate(given)
    base_url, key = config.upstream.get_provider(wire)
    upstream = Upstream(base_url, key, "0" * 16, NativeEngine(), 1, 1)
    settings = get_model_settings(config, "asked")
    scope = {"raw_path": WIRES[wire].path_suffix, "query_string": b"", "headers": [(b"x-api-key", b"k")]}
    found = build_summary_routes(
        config, settings, STRATEGIES["anchored"], upstream, scope, "asked", WIRES[wire]
    )
    assert [each.model for each in found] == expected
    assert {each.wire.name for each in found} <= {wire}


def test_summary_calls_select_all_beta_features_that_the_client_selects() -> None:
    upstream = Upstream("https://up.example", "", "0" * 16, NativeEngine(), 1, 1)
    config = Config(upstream=UpstreamSection(base_url="https://up.example"))
    headers = [(b"x-api-key", b"k"), (b"anthropic-beta", b"one"), (b"anthropic-beta", b"two, three")]
    scope = {"raw_path": WIRES["messages"].path_suffix, "query_string": b"", "headers": headers}
    settings, policy = get_model_settings(config, "claude"), STRATEGIES["full"]
    (route,) = build_summary_routes(config, settings, policy, upstream, scope, "claude", WIRES["messages"])
    assert route.headers["anthropic-beta"] == "one, two, three"
