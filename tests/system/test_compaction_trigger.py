"""Codex's compaction: an input that ends in a trigger gets one compaction item, whatever the upstream can."""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.free_ports import find_free_port
from tests.system.black_box import Answer, Provider, Received, Reply, run_proxy, run_server

PATH = "/v1/responses"
KEY = {"authorization": "Bearer sk-one"}
TRIGGER = {"type": "compaction_trigger"}
NATIVE = "gAAAAA-of-the-provider"
PORT_FACT = "The staging database listens on port 6543."


def stream(output: list[Any]) -> Reply:
    """A streamed answer that consists of these items."""
    usage = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}
    done = {"id": "resp_1", "object": "response", "status": "completed", "output": output, "usage": usage}
    events: list[Any] = [
        {"type": "response.created", "response": {**done, "output": [], "status": "in_progress"}}
    ]
    for index, item in enumerate(output):
        events += [
            {"type": f"response.output_item.{stage}", "output_index": index, "item": item}
            for stage in ("added", "done")
        ]
    events.append({"type": "response.completed", "response": done})
    text = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)
    return Reply(body=text.encode(), headers={"content-type": "text/event-stream"})


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def answer_plainly(_: Received) -> Reply:
    """A provider that answers whatever it is asked, and ignores a trigger."""
    return stream([said("Done as asked.")])


def refuse(request: Received, message: str) -> Reply:
    """A provider that knows neither triggers nor compaction items."""
    body = request.json()
    kinds = [each.get("type", "message") for each in body["input"]] if isinstance(body["input"], list) else []
    if {"compaction", "compaction_trigger"} & set(kinds):
        error = {"message": message, "type": "invalid_request_error", "param": "input", "code": None}
        return Reply(400, json.dumps({"error": error}).encode())
    return answer_plainly(request)


def answer_natively(request: Received) -> Reply:
    """A provider that compacts by itself, and takes no item but its own."""
    body = request.json()
    for each in body["input"]:
        if each.get("type") == "compaction" and each["encrypted_content"] != NATIVE:
            error = {"message": "not verified", "code": "invalid_encrypted_content"}
            return Reply(400, json.dumps({"error": error}).encode())
    if body["input"][-1] == TRIGGER:
        return stream([{"type": "compaction", "id": "cmp_1", "encrypted_content": NATIVE}])
    return answer_plainly(request)


LACKING: dict[str, Answer] = {
    "ignores the trigger": answer_plainly,
    "names the type": lambda request: refuse(
        request, "Invalid value: 'compaction_trigger'. Supported values are: 'message' and 'reasoning'."
    ),
    "refuses as llama.cpp": lambda request: refuse(request, "Cannot determine type of 'item'"),
}


def read_events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


class Codex:
    """Keeps a history as Codex does, and compacts it as Codex does.

    Attributes:
        history: The items that the next request sends.
        failures: What Codex would have shown as an error.
        calls: Calls of tools so far.
    """

    def __init__(self, client: httpx.Client, model: str = "m", **members: Any) -> None:
        self.client = client
        self.body: dict[str, Any] = {
            "model": model,
            "instructions": "Be brief.",
            "stream": True,
            "store": False,
            **members,
        }
        self.context = [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Sandboxed."}],
            },
            user("<environment_context>\n<cwd>/repo</cwd>\n</environment_context>"),
        ]
        self.history: list[Any] = list(self.context)
        self.failures: list[str] = []
        self.calls = 0

    def ask(self, items: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The items of `response.output_item.done`, and the response that completed; empty after an error."""
        reply = self.client.post(PATH, json={**self.body, "input": items}, headers=KEY)
        if reply.status_code != 200:
            self.failures.append(f"{reply.status_code}: {reply.text[:200]}")
            return [], {}
        events = list(read_events(reply))
        made = [each["item"] for each in events if each["type"] == "response.output_item.done"]
        completed = [each["response"] for each in events if each["type"] == "response.completed"]
        if not completed:
            self.failures.append("stream closed before response.completed")
        return made, completed[0] if completed else {}

    def turn(self, text: str, result: str = "") -> None:
        """A turn of the user, with a tool's result where there is one."""
        self.history.append(user(text))
        if result:
            self.calls += 1
            call = f"call_{self.calls}"
            self.history += [
                {"type": "function_call", "call_id": call, "name": "shell", "arguments": "{}"},
                {"type": "function_call_output", "call_id": call, "output": result},
            ]
        made, _ = self.ask(self.history)
        self.history += made

    def compact(self) -> dict[str, Any]:
        """Keep what users said, and one compaction item; the response that brought it."""
        made, response = self.ask([*self.history, TRIGGER])
        found = [each for each in made if each["type"] == "compaction"]
        if len(found) != 1:
            self.failures.append(
                f"expected exactly one compaction output item, got {len(found)} from {len(made)} output items"
            )
            return response
        kept = [
            each
            for each in self.history
            if each.get("role") == "user"
            and not each["content"][0]["text"].startswith("<environment_context>")
        ]
        self.history = [*kept[:-1], *self.context, *kept[-1:], found[0]]
        return response

    def work(self, rounds: int, turns: int = 4, lines: int = 40) -> list[dict[str, Any]]:
        """Turns and compactions by turns; the responses to the triggers."""
        made = []
        for number in range(rounds):
            for turn in range(turns):
                fact = PORT_FACT if (number, turn) == (0, 0) else ""
                output = f"{fact}\n" + f"line {number}.{turn} of the build output\n" * lines
                self.turn(f"Step {number}.{turn}: look at the next module.", output)
            made.append(self.compact())
        return made


class Forgetful(Codex):
    """Keeps nothing but the compaction item, as the provider's documentation allows."""

    def compact(self) -> dict[str, Any]:
        response = super().compact()
        self.history = self.history[-1:]
        return response


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts providers that end with the test."""
    running: list[Provider] = []

    def start(answer: Answer) -> Provider:
        running.append(Provider(answer))
        return running[-1]

    yield start
    for each in running:
        each.close()


def items_sent(request: Received) -> list[Any]:
    listed = request.json()["input"]
    return listed if isinstance(listed, list) else []


def has_trigger(request: Received) -> bool:
    return TRIGGER in items_sent(request)


@pytest.mark.parametrize("answer", LACKING.values(), ids=LACKING)
def test_five_compactions_in_a_session_succeed_where_the_upstream_has_none(
    answer: Answer, run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    provider = run(answer)
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        codex = Codex(client)
        responses = codex.work(5)
        codex.turn("And now?")
    assert codex.failures == []
    assert all(each["id"] and each["usage"]["total_tokens"] > 0 for each in responses)
    assert [has_trigger(each) for each in provider.received].count(True) == 1  # it is asked once
    last = provider.received[-1]
    assert all(each.get("type") != "compaction" for each in items_sent(last))
    assert "6543" in json.dumps(last.json())
    assert len(last.body) < 10_000


def test_five_compactions_in_a_session_are_the_upstreams_where_it_has_them(
    run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    provider = run(answer_natively)
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        codex = Codex(client)
        codex.work(5)
        before = codex.history
        body = json.dumps({**codex.body, "input": [*before, user("And now?")]}).encode()
        client.post(PATH, content=body, headers={**KEY, "content-type": "application/json"})
    assert codex.failures == []
    assert [has_trigger(each) for each in provider.received].count(True) == 5
    assert before[-1]["encrypted_content"] == NATIVE
    assert provider.received[-1].body == body


def test_what_users_said_stays_theirs_over_five_compactions_of_a_client_that_keeps_nothing_else(
    run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    provider = run(answer_plainly)
    rule = "Never push to the branch main."
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        codex = Forgetful(client)
        codex.turn("Tidy the module of the parser.", "done")
        codex.turn(rule, "noted")
        codex.work(5)
        codex.turn("And now?")
    assert codex.failures == []
    items = items_sent(provider.received[-1])
    texts = [each["content"] for each in items if isinstance(each.get("content"), str)]
    [carried] = [each for each in texts if rule in each]
    quoted, _, observed = carried.partition("Observed in tool output")
    assert rule in quoted
    assert "6543" in observed
    assert "6543" not in quoted
    assert "Tidy the module of the parser." in json.dumps(items)
    assert [each["role"] for each in items if "Sandboxed." in json.dumps(each)] == ["developer"]


def compact_once(codex: Codex) -> dict[str, Any]:
    """The item that a session of one compaction ends in."""
    codex.work(1)
    assert codex.failures == []
    item: dict[str, Any] = codex.history[-1]
    return item


def test_an_altered_item_and_one_of_another_tenant_are_refused_with_400(
    run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    provider = run(answer_plainly)
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        codex = Codex(client)
        item = compact_once(codex)
        token = item["encrypted_content"]
        middle = len(token) // 2
        altered = token[:middle] + ("A" if token[middle] != "A" else "B") + token[middle + 1 :]
        asked = len(provider.received)

        def send(content: str, headers: Mapping[str, str]) -> httpx.Response:
            items = [user("Go on."), {**item, "encrypted_content": content}]
            return client.post(PATH, json={**codex.body, "input": items}, headers=headers)

        refused = [
            send(altered, KEY),
            send(token[:-8], KEY),
            send(token, {"authorization": "Bearer sk-two"}),
            send(token, {}),
        ]
        assert len(provider.received) == asked
        assert send(token, KEY).status_code == 200
    assert [each.status_code for each in refused] == [400] * 4
    errors = [each.json()["error"] for each in refused]
    assert {each["type"] for each in errors} == {"invalid_request_error"}
    assert {each["code"] for each in errors} == {"invalid_encrypted_content"}
    assert PORT_FACT not in token


def test_an_item_is_expanded_after_a_restart_with_the_same_store(
    run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    provider = run(answer_plainly)
    config = {"store": {"url": f"sqlite:///{tmp_path}/state.db"}}
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        codex = Codex(client)
        compact_once(codex)
    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        codex.client = client
        codex.turn("And now?")
        sent = provider.received[-1]
        codex.work(1)
    assert codex.failures == []
    assert all(each.get("type") != "compaction" for each in items_sent(sent))
    assert "6543" in json.dumps(sent.json())
    assert [has_trigger(each) for each in provider.received].count(True) == 1  # the restart forgets nothing


def test_an_item_that_an_earlier_secret_sealed_is_expanded(
    run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    provider = run(answer_plainly)
    with run_proxy(tmp_path, provider.url, {"server": {"secret": "one"}}) as proxy, proxy.client() as client:
        codex = Codex(client)
        compact_once(codex)
    statuses = []
    for server in ({"secret": "two", "previous_secrets": ["zero", "one"]}, {"secret": "two"}):
        with run_proxy(tmp_path, provider.url, {"server": server}) as proxy, proxy.client() as client:
            body = {**codex.body, "input": [*codex.history, user("And now?")]}
            statuses.append(client.post(PATH, json=body, headers=KEY).status_code)
    assert statuses == [200, 400]


def test_items_of_the_upstreams_own_pass_untouched(run: Callable[[Answer], Provider], tmp_path: Path) -> None:
    provider = run(answer_plainly)
    foreign = b'{ "encrypted_content":"%b",  "id": "cmp_1","type" :"compaction"}' % NATIVE.encode()
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        codex = Codex(client)
        ours = json.dumps(compact_once(codex)).encode()
        head, tail = json.dumps({**codex.body, "input": ["HERE"]}).encode().split(b'"HERE"')
        last = json.dumps(user("Go on.")).encode()
        headers = {**KEY, "content-type": "application/json"}
        alone = head + foreign + b" , " + last + tail
        client.post(PATH, content=alone, headers=headers)
        client.post(PATH, content=head + b",".join((foreign, ours, last)) + tail, headers=headers)
    sent_alone, sent_both = provider.received[-2:]
    assert sent_alone.body == alone
    assert sent_both.body.startswith(head + foreign)
    assert sent_both.body.endswith(last + tail)
    assert [each.get("type") for each in items_sent(sent_both)].count("compaction") == 1


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
def test_another_failure_of_the_upstream_is_relayed_and_teaches_nothing(
    status: int, run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    said_body = b'{"error": {"message": "not now", "code": "other"}}'
    provider = run(lambda _: Reply(status, said_body))
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        body = {"model": "m", "stream": True, "input": [user("Hello"), TRIGGER]}
        replies = [client.post(PATH, json=body, headers=KEY) for _ in range(2)]
    assert [(each.status_code, each.content) for each in replies] == [(status, said_body)] * 2
    assert [each.json() for each in provider.received] == [body] * 2


def test_a_trigger_that_the_upstream_refuses_for_length_is_answered(
    run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    message = (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."
    )
    error = {"message": message, "type": "invalid_request_error", "code": "context_length_exceeded"}
    provider = run(lambda _: Reply(400, json.dumps({"error": error}).encode()))
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        codex = Codex(client)
        codex.history += [user("word " * 9_000), said("Done."), user("Hello")]
        codex.compact()
        codex.compact()
    assert codex.failures == []
    assert [has_trigger(each) for each in provider.received].count(
        True
    ) == 2  # length says nothing of triggers


def test_a_trigger_without_a_stream_gets_one_json_object(
    run: Callable[[Answer], Provider], tmp_path: Path
) -> None:
    plain = {"id": "resp_1", "object": "response", "status": "completed", "output": [said("Done.")]}
    packed = gzip.compress(json.dumps(plain).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    provider = run(lambda _: Reply(200, packed, headers))
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        body = {"model": "m", "input": [user("Hello"), TRIGGER]}
        made = [client.post(PATH, json=body, headers=KEY).json() for _ in range(2)]
    assert [[each["type"] for each in answer["output"]] for answer in made] == [["compaction"]] * 2
    assert len([each for each in provider.received if has_trigger(each)]) == 1


def test_who_answers_a_trigger_is_configured(run: Callable[[Answer], Provider], tmp_path: Path) -> None:
    provider = run(answer_plainly)
    body = {"model": "m", "stream": True, "input": [user("Hello"), TRIGGER]}
    kinds = {}
    for mode in ("relay", "answer"):
        provider.received.clear()
        upstream = {"upstream": {"responses_compact": mode}}
        with run_proxy(tmp_path, provider.url, upstream) as proxy, proxy.client() as client:
            reply = client.post(PATH, json=body, headers=KEY)
        made = [each["item"]["type"] for each in read_events(reply) if each["type"].endswith("item.done")]
        kinds[mode] = made, sum(map(has_trigger, provider.received))
    assert kinds == {"relay": (["message"], 1), "answer": (["compaction"], 0)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_compactions_in_a_session_succeed_before_llama_cpp(shared: Path, tmp_path: Path) -> None:
    port = find_free_port()
    command: list[str | Path] = [shared / "tools" / "real_upstream" / "start.sh", str(port), "8192", "2"]
    with (
        run_server(command, f"http://127.0.0.1:{port}/health"),
        run_proxy(tmp_path, f"http://127.0.0.1:{port}/v1") as proxy,
        proxy.client() as client,
    ):
        codex = Codex(client, model="tiny-random", max_output_tokens=16)
        codex.work(5, turns=2, lines=12)
        codex.turn("And now?")
    assert codex.failures == []
