"""The monitor of summary models: what it asks, what it learns from calls, and when it is content again."""

import asyncio
import json

import httpx
import pytest

from compaction_proxy.config.config import Config
from compaction_proxy.core.summary.call import SummaryCall
from compaction_proxy.gateway import summary_monitor
from compaction_proxy.gateway.summary_monitor import SummaryModelMonitor

BASE_URL = "http://127.0.0.1:9/v1"


class Scene:
    """A provider that answers as told, and the monitor of a configuration."""

    def __init__(self, **summary: str) -> None:
        self.status, self.models, self.asked = 200, ["m"], 0
        self.monitor = SummaryModelMonitor(httpx.MockTransport(self.answer), build_config(**summary))

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if not self.status:
            raise httpx.ConnectError("x", request=request)
        rows = [{"id": name} for name in self.models]
        return httpx.Response(self.status, content=json.dumps({"data": rows}).encode())

    async def check(self) -> list[str]:
        await self.monitor.start_check()
        return self.problems

    @property
    def problems(self) -> list[str]:
        return [problem.what for problem in self.monitor.list_problems()]

    def call(self, reason: str, model: str = "m", url: str = BASE_URL) -> list[str]:
        call = SummaryCall(f"{url}/chat/completions", {}, model, "", "", 1, None)
        self.monitor.record_outcome(call, reason)
        return self.problems


def build_config(**summary: str) -> Config:
    return Config.model_validate({"upstream": {"base_url": BASE_URL}, "summary": summary})


MISSING = ["The provider does not have the summary model."]
REFUSED = ["The provider of the summary model rejects the API key."]
AWAY = ["The provider of the summary model cannot be reached."]


@pytest.mark.parametrize("summary", [{}, {"model": "same"}, {"model": "none"}])
async def test_only_a_model_that_the_configuration_names_is_asked_for(summary: dict[str, str]) -> None:
    scene = Scene(**summary)
    assert (await scene.check(), scene.asked) == ([], 0)
    assert scene.call("unknown-model") == []


async def test_a_check_tells_a_missing_model_from_a_refused_key_and_a_provider_that_is_away() -> None:
    scene = Scene(model="m", api_key="k")
    assert await scene.check() == []
    scene.models = ["other"]
    assert await scene.check() == MISSING
    scene.status = 0
    assert await scene.check() == AWAY
    scene.status = 401
    assert await scene.check() == REFUSED
    scene.status = 403  # the key may be good for summaries all the same
    scene.models = []
    assert await scene.check() == REFUSED
    scene.status, scene.models = 200, ["m"]
    assert await scene.check() == []


async def test_a_key_that_clients_bring_is_never_blamed() -> None:
    scene = Scene(model="m")
    scene.status = 401
    assert await scene.check() == []
    assert scene.call("http-401") == []


def test_summary_calls_tell_too() -> None:
    scene = Scene(model="m", api_key="k")
    assert scene.call("unknown-model") == MISSING
    assert scene.call("", model="other") == MISSING
    assert scene.call("", url="http://elsewhere/v1") == MISSING
    assert scene.call("garbage") == MISSING
    assert scene.call("") == []
    assert scene.call("http-401") == REFUSED
    assert scene.call("unreachable") == AWAY
    assert scene.call("http-500") == []


@pytest.mark.parametrize(
    ("reason", "problems"), [("http-401", REFUSED), ("http-403", REFUSED), ("unknown-model", MISSING)]
)
async def test_a_list_of_models_does_not_refute_a_call_that_was_refused(
    reason: str, problems: list[str]
) -> None:
    scene = Scene(model="m", api_key="k")
    assert scene.call(reason) == problems
    assert await scene.check() == problems  # the provider lists the model, as OpenRouter does for any key
    assert scene.call("") == []


async def test_a_list_that_confirms_a_refused_call_ends_the_failure_later() -> None:
    scene = Scene(model="m", api_key="k")
    scene.call("unknown-model")
    scene.models = ["other"]
    assert await scene.check() == MISSING
    scene.models = ["m"]
    assert await scene.check() == []


def test_a_call_that_was_not_found_may_have_the_wrong_base_url() -> None:
    scene = Scene(model="m", base_url=BASE_URL)
    scene.call("unknown-model")
    [problem] = scene.monitor.list_problems()
    assert problem.fix == (
        f"{BASE_URL} did not find 'm': set summary.model to another model, or correct summary.base_url."
    )


async def test_a_model_that_its_provider_does_not_list_stays_sound_while_another_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary_monitor, "RECHECK_INTERVAL_S", 0.0)
    scene = Scene(model="unlisted")
    scene.monitor.set_config(
        Config.model_validate(
            {
                "upstream": {"base_url": BASE_URL},
                "summary": {"model": "unlisted"},
                "models": {"my-*": {"summary": {"model": "gone"}}},
            }
        )
    )
    assert await scene.check() == MISSING * 2
    assert scene.call("", model="unlisted") == MISSING
    checking = asyncio.create_task(scene.monitor.recheck_periodically())
    asked = scene.asked
    while scene.asked < asked + 3:  # noqa: ASYNC110 - the monitor offers no event to wait for
        await asyncio.sleep(0)
    checking.cancel()
    assert scene.problems == MISSING


async def test_a_model_that_has_answered_is_sound_although_its_provider_does_not_list_it() -> None:
    scene = Scene(model="m")
    scene.models = ["other"]
    assert await scene.check() == MISSING
    assert scene.call("") == []
    scene.monitor.set_config(build_config(model="m"))  # as a reload does
    assert await scene.check() == []
    assert scene.call("unknown-model") != []  # a refused call counts more than an earlier success


async def test_a_model_that_is_no_longer_configured_is_no_problem() -> None:
    scene = Scene(model="gone")
    assert await scene.check() == MISSING
    scene.monitor.set_config(build_config(model="m"))
    assert scene.problems == []
    await scene.monitor.close()


async def test_while_something_is_wrong_the_provider_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_monitor, "RECHECK_INTERVAL_S", 0.0)
    scene = Scene(model="gone")
    assert await scene.check() == MISSING
    checking = asyncio.create_task(scene.monitor.recheck_periodically())
    scene.models.append("gone")
    while scene.problems:  # noqa: ASYNC110 - the monitor offers no event to wait for
        await asyncio.sleep(0)
    asked = scene.asked
    for _ in range(10):
        await asyncio.sleep(0)
    checking.cancel()
    assert scene.asked == asked
