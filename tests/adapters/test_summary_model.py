import httpx
import pytest

from proxy.adapters.summary_model import HttpSummaryModel
from proxy.errors import SummaryFailed
from proxy.ports import SummaryAnswer, SummaryCall

SAID = {"choices": [{"message": {"content": "Done."}, "finish_reason": "stop"}]}


def call(key: str = "sk-a") -> SummaryCall:
    return SummaryCall(
        url="http://summary.test/v1/chat/completions",
        headers={"authorization": f"Bearer {key}"},
        model="m",
        system="s",
        prompt="p",
        max_tokens=10,
        temperature=0.3,
    )


async def test_a_cookie_set_for_one_credential_is_not_sent_with_another() -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("cookie"))
        return httpx.Response(200, json=SAID, headers={"set-cookie": "session=alice; Path=/"})

    model = HttpSummaryModel(httpx.MockTransport(answer))
    assert await model.ask(call("sk-alice")) == SummaryAnswer("Done.", "stop")
    await model.ask(call("sk-bob"))
    assert seen == [None, None]


async def test_a_credential_goes_out_byte_for_byte_whatever_its_characters() -> None:
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(dict(request.headers.raw)[b"authorization"])
        return httpx.Response(200, json=SAID)

    await HttpSummaryModel(httpx.MockTransport(answer)).ask(call("k\xe9y"))
    assert seen == [b"Bearer k\xe9y"]


async def test_a_member_that_is_refused_is_left_out_from_then_on() -> None:
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        if b"temperature" in request.content:
            return httpx.Response(400, json={"error": {"message": "no", "param": "temperature"}})
        return httpx.Response(200, json=SAID)

    model = HttpSummaryModel(httpx.MockTransport(answer))
    await model.ask(call())
    await model.ask(call())
    assert [b"temperature" in body for body in bodies] == [True, False, False]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (httpx.Response(500), "http-500"),
        (httpx.Response(302, headers={"location": "http://elsewhere.test/"}), "http-302"),
        (httpx.Response(404, json={"error": {"code": "model_not_found"}}), "unknown-model"),
        (httpx.Response(200, text="<html>"), "garbage"),
        (httpx.Response(200, content=b"x" * 2_000_000), "garbage"),
        (httpx.Response(400, text="prompt is too long: 9 tokens > 8 maximum"), "overflow"),
    ],
)
async def test_what_is_no_answer_has_a_reason(response: httpx.Response, reason: str) -> None:
    model = HttpSummaryModel(httpx.MockTransport(lambda _: response))
    with pytest.raises(SummaryFailed) as caught:
        await model.ask(call())
    assert caught.value.reason == reason
