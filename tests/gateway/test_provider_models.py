"""Lists of models: what counts as listed, how the key is sent, and what is said of a provider that fails."""

import json

import httpx
import pytest

from compaction_proxy.core.errors import ProxyError
from compaction_proxy.gateway.provider_models import ModelList, fetch_model_list

OK = httpx.Response(200)


@pytest.mark.parametrize(
    ("names", "model", "is_lacking"),
    [
        ({"a", "b"}, "a", False),
        ({"a", "b"}, "c", True),
        (set(), "c", False),
        ({"llama3:latest"}, "llama3", False),
        ({"llama3:8b"}, "llama3:70b", True),
        ({"vendor/model"}, "vendor/model:floor", False),
    ],
)
def test_a_model_is_lacking_only_where_the_list_is_known(
    names: set[str], model: str, *, is_lacking: bool
) -> None:
    assert ModelList(OK, frozenset(names)).lacks_model(model) is is_lacking


def create_transport(
    asked: list[httpx.Request], status: int = 200, body: object = None
) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(status, content=json.dumps(body).encode())

    return httpx.MockTransport(answer)


async def test_the_key_is_sent_as_the_wire_has_it_and_without_a_body_that_is_no_list_nothing_is_known() -> (
    None
):
    asked: list[httpx.Request] = []
    listed = await fetch_model_list(
        create_transport(asked, body={"data": [{"id": "a", "meta": {}}]}), "http://h/v1/", "k"
    )
    assert (listed.names, listed.takes_any_name, listed.lacks_model("other")) == (
        frozenset({"a"}),
        True,
        False,
    )
    unlisted = await fetch_model_list(create_transport(asked, 404, [1]), "http://h", "k", "messages")
    assert unlisted.names == frozenset()
    assert [str(each.url) for each in asked] == ["http://h/v1/models", "http://h/v1/models"]
    assert asked[0].headers["authorization"] == "Bearer k"
    assert (asked[1].headers["x-api-key"], "authorization" in asked[1].headers) == ("k", False)


async def test_a_provider_that_fails_is_described_in_words() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("x", request=request)

    with pytest.raises(ProxyError, match=r"^connection closed without a valid answer$"):
        await fetch_model_list(httpx.MockTransport(fail), "http://h/v1", "")
