"""One summary for all replicas, over a store that is not next door.

A round trip of 20 ms to Redis is usual between two zones. A burst of requests has more calls to make than can
be under way at once, so some wait in the process. That is no reason to go on without the store.
"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.fault_tcp import Faults, FaultTcp
from tests.helpers.redis_servers import RedisServer
from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

CLIENTS = 60
# On a busy machine the store may answer too late. The proxy then goes on without it, which shows nothing.
ATTEMPTS = 3
ROUND_TRIP_S = 0.02
TRIGGER_TOKENS = 3_000
SUMMARY_MODEL = "summary-model"
LONG = "The worker reads the next job from the queue and writes its result into the table of reports. " * 15
SUMMARY = "They went through the parts of the report one by one. Nothing is open."
CONFIG: dict[str, Any] = {
    "summary": {"model": SUMMARY_MODEL},
    "compaction": {"trigger": [{"tokens": TRIGGER_TOKENS}]},
}


@contextmanager
def distant(port: int) -> Iterator[int]:
    """A port that leads to another one, whose answers come later by a round trip."""
    loop = asyncio.new_event_loop()
    between = FaultTcp(port)
    between.back = Faults(delay_s=ROUND_TRIP_S)
    serving = threading.Thread(target=loop.run_forever)
    serving.start()
    try:
        asyncio.run_coroutine_threadsafe(between.listen(), loop).result()
        yield between.port
    finally:
        asyncio.run_coroutine_threadsafe(between.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        serving.join()
        loop.close()


class CountingProvider:
    """Answers, and counts the summary calls."""

    def __init__(self) -> None:
        self.summaries = 0

    def __call__(self, request: Received) -> Reply:
        if request.json()["model"] != SUMMARY_MODEL:
            return chat_reply(request)
        self.summaries += 1
        return chat_reply(request, SUMMARY)


def conversation() -> list[dict[str, str]]:
    """A first request that is far over the trigger."""
    told = [{"role": ("user", "assistant")[k % 2], "content": f"Part {k}: {LONG}"} for k in range(40)]
    return [*told, {"role": "user", "content": "And now?"}]


def send_at_once(replicas: list[Proxy]) -> list[str]:
    """Send the same request from all clients, to the replicas in turn. Returns what each answer says."""
    body = {"model": "m", "messages": conversation()}
    limits = httpx.Limits(max_connections=CLIENTS)
    ready = threading.Barrier(CLIENTS)
    with ExitStack() as stack:
        clients = [stack.enter_context(each.client(limits=limits)) for each in replicas]

        def send(number: int) -> str:
            client = clients[number % len(clients)]
            client.get("/livez").raise_for_status()  # so that there is a connection
            ready.wait()
            answer = client.post("/v1/chat/completions", json=body).raise_for_status()
            status: str = answer.headers["x-compaction-status"]
            return status

        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(send, range(CLIENTS)))


def play_burst(folder: Path) -> tuple[int, list[str], list[str]]:
    """Returns the number of summaries, what each answer says, and why the store failed, where it did."""
    answer = CountingProvider()
    with ExitStack() as stack:
        provider = Provider(answer)
        stack.callback(provider.close)
        folders = [folder / name for name in ("redis", "one", "other")]
        for each in folders:
            each.mkdir(parents=True)
        redis = stack.enter_context(RedisServer(folders[0]))
        port = stack.enter_context(distant(redis.port))
        config = {**CONFIG, "store": {"url": f"redis://127.0.0.1:{port}/0"}}
        replicas = [stack.enter_context(run_proxy(each, provider.url, config)) for each in folders[1:]]
        statuses = send_at_once(replicas)
        failures = [line["reason"] for each in replicas for line in each.log_lines("store.failed")]
    return answer.summaries, statuses, failures


def test_a_burst_of_first_requests_makes_one_summary_over_a_store_in_another_zone(tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        summaries, statuses, failures = play_burst(tmp_path / str(attempt))
        assert set(statuses) <= {"applied", "reused"}
        if not failures:
            break
    assert summaries == 1, failures
