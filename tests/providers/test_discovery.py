"""Where servers tell the window of a model, and what of it counts."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.providers.discovery import build_local_urls, build_model_urls, parse_window

MODEL = "org/model"


def listed(*entries: Any) -> dict[str, Any]:
    return {"object": "list", "data": list(entries)}


@pytest.mark.parametrize(
    ("page", "window"),
    [
        # vLLM, SGLang
        (listed({"id": MODEL, "max_model_len": 32_768}, {"id": "other", "max_model_len": 4_096}), 32_768),
        # llama.cpp: any name is served by the one model
        (listed({"id": "/models/x.gguf", "meta": {"n_ctx": 8_192, "n_ctx_train": 131_072}}), 8_192),
        (listed({"id": "/models/x.gguf", "meta": {"n_ctx_train": 131_072}}), None),
        ({"default_generation_settings": {"n_ctx": 4_096}, "total_slots": 2}, 4_096),
        # OpenRouter: the smaller of both
        (
            listed({"id": MODEL, "context_length": 262_144, "top_provider": {"context_length": 131_072}}),
            131_072,
        ),
        (listed({"id": MODEL, "context_length": 262_144, "top_provider": {"context_length": None}}), 262_144),
        ({"data": {"id": MODEL, "context_length": 65_536}}, 65_536),
        # Groq
        ({"id": MODEL, "context_window": 131_072}, 131_072),
        # LM Studio: what it may be loaded with does not count
        (listed({"id": MODEL, "max_context_length": 131_072, "loaded_context_length": 4_096}), 4_096),
        (listed({"id": MODEL, "max_context_length": 131_072, "state": "not-loaded"}), None),
        # Ollama
        ({"models": [{"name": f"{MODEL}:latest", "context_length": 4_096}]}, 4_096),
        ({"models": [{"name": f"{MODEL}:8b", "context_length": 4_096}]}, None),
        ({"models": []}, None),
        # OpenAI
        (listed({"id": MODEL, "object": "model", "owned_by": "system"}), None),
        # nothing that could be true
        (listed({"id": MODEL, "max_model_len": 0}), None),
        (listed({"id": MODEL, "max_model_len": True}), None),
        (listed({"id": MODEL, "max_model_len": "32768"}), None),
        (listed({"id": MODEL, "max_model_len": 10**12}), None),
        (listed(None, 3, [MODEL], {"id": [MODEL]}), None),
        (listed({"id": "other", "max_model_len": 4_096}), None),
    ],
)
def test_a_page_tells_the_window(page: Any, window: int | None) -> None:
    assert parse_window(json.dumps(page).encode(), MODEL) == window


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["data", "models", "id", "meta", "n_ctx", "top_provider"]), inner
            )
        ),
        max_leaves=20,
    )
)
def test_no_page_makes_it_fail(page: object) -> None:
    assert parse_window(json.dumps(page).encode(), MODEL) is None or isinstance(page, dict | list)


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(body: bytes) -> None:
    assert parse_window(body, MODEL) is None


def test_deep_json_makes_it_say_nothing() -> None:
    assert parse_window(b"[" * 100_000, MODEL) is None


def test_the_list_is_asked_for_before_the_model() -> None:
    assert build_model_urls("https://openrouter.ai/api/v1", MODEL) == (
        "https://openrouter.ai/api/v1/models",
        "https://openrouter.ai/api/v1/models/org/model",
    )


@pytest.mark.parametrize("model", ["", "../../admin", "a/../b"])
def test_a_name_never_leads_to_another_page(model: str) -> None:
    assert build_model_urls("http://up.test/v1", model) == ("http://up.test/v1/models",)


@given(st.text(min_size=1))
def test_any_name_gives_an_address_below_the_list(model: str) -> None:
    for url in build_model_urls("http://up.test/v1", model):
        assert url.startswith("http://up.test/v1/models")
        assert url.isascii()
        assert not set(url) & set("?# \n")


@pytest.mark.parametrize(
    "base_url",
    [
        "https://api.openai.com/v1",
        "https://mine.openai.azure.com/openai",
        "https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1",
        "https://generativelanguage.googleapis.com/v1beta/openai",
    ],
)
def test_a_provider_that_tells_nothing_is_not_asked(base_url: str) -> None:
    assert (build_model_urls(base_url, MODEL), build_local_urls(base_url)) == ((), ())


@pytest.mark.parametrize(
    "origin",
    [
        "http://127.0.0.1:8080",
        "http://[::1]:8080",
        "http://10.0.0.4",
        "http://ollama:11434",
        "http://pc.local",
    ],
)
def test_a_local_server_is_asked_for_its_own_pages(origin: str) -> None:
    pages = (f"{origin}/props", f"{origin}/api/v0/models", f"{origin}/api/ps")
    assert (
        build_local_urls(f"{origin}/v1")
        == build_local_urls(f"{origin}/v1/")
        == build_local_urls(origin)
        == pages
    )


@pytest.mark.parametrize("base_url", ["https://openrouter.ai/api/v1", "http://8.8.8.8/v1"])
def test_a_server_on_the_internet_is_not_asked_for_pages_of_local_ones(base_url: str) -> None:
    assert build_local_urls(base_url) == ()
