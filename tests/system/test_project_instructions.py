"""What agents say of a project before a user's words, such as CLAUDE.md, survives every round; no fake does.

The shapes are those of the real clients: Claude Code on Messages, Codex on Responses, Qwen Code on chat
completions.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

WINDOW = 40_000
RULES = 140
STEPS = 24
RESULT_LINES = 90
KEY = {"authorization": "Bearer admin"}
TASK = "Please fix the parser of invoices. Start with the failing test of the net amount."
SECOND = "Now do the same for credit notes, and keep the public names."


def rules_text(version: int, count: int = RULES) -> str:
    """A rules file of about 35 tokens a line."""
    return "\n".join(
        f"- Rule {k} of version {version}: in module m{k} the function f{k} takes two arguments, the "
        f"second is a mapping of names to sizes."
        for k in range(count)
    )


def rules_left(seen: str, version: int, count: int = RULES) -> int:
    """How many lines of a rules file stand in a text."""
    return sum(line in seen for line in rules_text(version, count).splitlines())


def reminder(version: int, path: str = "/repo/CLAUDE.md", count: int = RULES) -> str:
    return (
        "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n"
        "# claudeMd\nCodebase and user instructions are shown below.\n\n"
        f"Contents of {path} (project instructions, checked into the codebase):\n\n"
        f"{rules_text(version, count)}\n# currentDate\nToday's date is 2026-11-23.\n</system-reminder>\n\n"
    )


def agents_md(version: int, path: str = "/repo", count: int = RULES) -> str:
    text = rules_text(version, count)
    return f"# AGENTS.md instructions for {path}\n\n<INSTRUCTIONS>\n{text}\n</INSTRUCTIONS>"


def environment(version: int, count: int = 0) -> str:
    text = rules_text(version, count)
    return (
        f"<environment_context>\n  <cwd>/repo-{version}</cwd>\n  <shell>bash</shell>\n{text}"
        "</environment_context>"
    )


def qwen_context(version: int, count: int = 100) -> str:
    text = rules_text(version, count)
    return f"This is the Qwen Code. We are setting up the context for our chat.\nToday is Monday.\n{text}"


FORMS = {
    "claude-code": reminder(7),
    "codex": agents_md(7),
    "codex-environment": environment(7, RULES),
    "qwen-code": qwen_context(7, RULES),
    "cline": f"<environment_details>\n{rules_text(7)}\n</environment_details>",
    "openhands": (
        "<EXTRA_INFO>\nThe following information has been included based on a keyword match for "
        f'"git".\n{rules_text(7)}\n</EXTRA_INFO>'
    ),
}
# What tells each client, and nothing else of a request.
EVIDENCE: dict[str, tuple[dict[str, str], str]] = {
    "claude-code": ({"user-agent": "claude-cli/2.1.197 (external, cli)"}, "You help."),
    "codex": ({"user-agent": "codex_cli_rs/0.169.0 (Debian 12.0.0; x86_64)"}, "You help."),
    "codex-environment": ({"originator": "codex_exec", "x-codex-window-id": "w:0"}, "You help."),
    "qwen-code": ({"user-agent": "QwenCode/0.15.10 (linux; x64)"}, "You help."),
    "cline": ({}, "You are Cline, a highly skilled software engineer."),
    "openhands": ({}, "You are OpenHands agent, a helpful AI assistant that can interact with a computer."),
}


def result_text(step: int) -> str:
    lines = (
        f"result {step} line {k}: the worker reads the next job of the queue." for k in range(RESULT_LINES)
    )
    return "\n".join((*lines, f"<result {step} ends>"))


class Wire:
    """Requests and answers of one wire."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = {
            "chat": "/v1/chat/completions",
            "messages": "/v1/messages",
            "responses": "/v1/responses",
        }[name]

    def request(self, system: str, messages: list[Any], model: str = "m") -> dict[str, Any]:
        if self.name == "chat":
            return {"model": model, "messages": [{"role": "system", "content": system}, *messages]}
        if self.name == "messages":
            return {"model": model, "system": system, "messages": messages, "max_tokens": 1_000}
        return {"model": model, "instructions": system, "input": messages}

    def user(self, *texts: str) -> dict[str, Any]:
        kind = "input_text" if self.name == "responses" else "text"
        message = {"role": "user", "content": [{"type": kind, "text": text} for text in texts]}
        return {"type": "message", **message} if self.name == "responses" else message

    def said(self, text: str) -> dict[str, Any]:
        if self.name == "responses":
            return {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": text}],
            }
        return {"role": "assistant", "content": text}

    def unit(self, name: object, text: str) -> list[Any]:
        """A tool call and its result."""
        call, given = f"call_{name}", {"path": f"src/m{name}.py"}
        if self.name == "chat":
            function = {"name": "read", "arguments": json.dumps(given)}
            calls = [{"id": call, "type": "function", "function": function}]
            return [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": call, "content": text},
            ]
        if self.name == "messages":
            use = {"type": "tool_use", "id": call, "name": "read", "input": given}
            answer = {"type": "tool_result", "tool_use_id": call, "content": text}
            return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
        return [
            {"type": "function_call", "call_id": call, "name": "read", "arguments": json.dumps(given)},
            {"type": "function_call_output", "call_id": call, "output": text},
        ]

    def listed(self, body: Any) -> list[Any]:
        found: list[Any] = body["input" if self.name == "responses" else "messages"]
        return found

    def answer(self, request: Received) -> Reply:
        if self.name == "chat":
            return chat_reply(request)
        used = len(request.body) // 4
        usage = {"input_tokens": used, "output_tokens": 1, "total_tokens": used + 1}
        text = {"type": "output_text" if self.name == "responses" else "text", "text": "ok"}
        if self.name == "messages":
            said = {"type": "message", "role": "assistant", "content": [text], "stop_reason": "end_turn"}
            return Reply(body=json.dumps({"id": "msg_1", "model": "m", **said, "usage": usage}).encode())
        item = {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
        made = {"id": "resp_1", "object": "response", "status": "completed", "model": "m", "output": [item]}
        return Reply(body=json.dumps({**made, "usage": usage}).encode())


WIRES = {name: Wire(name) for name in ("chat", "messages", "responses")}
SYSTEM = "You are an agent. " + "Use the tools and say what you do. " * 40


class Shape:
    """How one client sends its instructions.

    Attributes:
        wire: Its wire.
        headers: By which it is known.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.wire = WIRES[{"claude-code": "messages", "codex": "responses", "qwen-code": "chat"}[name]]
        self.headers, self.system = EVIDENCE[name]

    def opening(self, version: int, *said: str) -> list[Any]:
        """A turn of the user, with the instructions before it."""
        user = self.wire.user
        if self.name == "claude-code":
            surroundings = {"role": "system", "content": "# Environment\nThe platform is linux."}
            return [user(reminder(version), *said), surroundings]
        if self.name == "codex":
            instructions = user(agents_md(version), environment(version))
            return [{**instructions, "id": "msg_1"}, {**user(*said), "id": "msg_2"}]
        return [user(qwen_context(version)), self.wire.said("Got it. Thanks for the context!"), user(*said)]

    @property
    def rules(self) -> int:
        return 100 if self.name == "qwen-code" else RULES


SHAPES = ("claude-code", "codex", "qwen-code")


def start(folder: Path, provider: Provider, **sections: Any) -> Any:
    config = {
        "models": {"m": {"window": WINDOW}},
        "summary": {"model": "none"},
        "server": {"admin_key": "admin"},
        **sections,
    }
    return run_proxy(folder, provider.url, config)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, Provider]]:
    provider = Provider(answer)
    try:
        with start(tmp_path_factory.mktemp("proxy"), provider) as proxy:
            yield proxy, provider
    finally:
        provider.close()


def answer(request: Received) -> Reply:
    ending = request.path.rpartition("/")[2]
    return WIRES[{"completions": "chat"}.get(ending, ending)].answer(request)


def texts_of(body: Any) -> str:
    """All that the provider was sent, as one text."""
    return json.dumps(body, ensure_ascii=False).replace("\\n", "\n").replace('\\"', '"')


def send(
    proxy: Proxy,
    provider: Provider,
    wire: Wire,
    messages: list[Any],
    headers: dict[str, str],
    system: str = SYSTEM,
) -> tuple[Any, str, str]:
    """Sends one request; returns what reached the provider as JSON and as text, and the conversation."""
    provider.received.clear()
    with proxy.client(headers=headers) as client:
        answered = client.post(wire.path, json=wire.request(system, messages))
    assert answered.status_code == 200, answered.text
    body = provider.received[-1].json()
    return body, texts_of(body), answered.headers.get("x-compaction-session", "")


@pytest.mark.parametrize("has_session", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_instructions_task_and_latest_request_stay_whole_through_two_tasks(
    name: str, *, has_session: bool, running: tuple[Proxy, Provider]
) -> None:
    proxy, provider = running
    shape = Shape(name)
    headers = {**shape.headers, **({"x-session-id": f"keep-{name}"} if has_session else {})}
    task = f"{TASK} ({name}, {has_session})"
    messages = shape.opening(1, task)
    left, compacted = [], 0
    for step in range(2 * STEPS):
        if step == STEPS:
            messages += [shape.wire.said("The first task is done."), shape.wire.user(SECOND)]
        messages += shape.wire.unit(step, result_text(step))
        body, seen, _ = send(proxy, provider, shape.wire, messages, headers)
        compacted += len(shape.wire.listed(body)) < len(messages) or "left out" in seen
        left.append((rules_left(seen, 1, shape.rules), task in seen, step < STEPS or SECOND in seen))
        assert f"<result {step} ends>" in seen
    assert compacted > STEPS // 2
    assert left == [(shape.rules, True, True)] * (2 * STEPS)


@pytest.mark.parametrize("name", SHAPES)
def test_instructions_stay_in_user_role_before_the_task(name: str, running: tuple[Proxy, Provider]) -> None:
    proxy, provider = running
    shape = Shape(name)
    headers = {**shape.headers, "x-session-id": f"place-{name}"}
    messages = shape.opening(1, TASK)
    for step in range(STEPS):
        messages += shape.wire.unit(step, result_text(step))
    messages += [shape.wire.said("Done."), shape.wire.user(SECOND), *shape.wire.unit("x", "short")]
    body, seen, _ = send(proxy, provider, shape.wire, messages, headers)
    listed = shape.wire.listed(body)
    assert len(listed) < len(messages) or "left out" in seen
    with_rules = [each for each in listed if "Rule 0 of version 1" in json.dumps(each)]
    assert [each["role"] for each in with_rules] == ["user"]
    if name == "claude-code":
        roles = [each["role"] for each in listed if each["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
    assert seen.index("Rule 0 of version 1") < seen.index(TASK) < seen.index(SECOND)
    assert seen.count("- Rule 0 of version 1:") == 1  # and no record repeats it


def test_a_client_that_takes_another_one_s_name_is_known_by_its_system_prompt(
    running: tuple[Proxy, Provider],
) -> None:
    """Qwen Code calls itself Claude Code where it speaks to a gateway on Messages."""
    proxy, provider = running
    wire, (headers, _) = WIRES["messages"], EVIDENCE["claude-code"]
    system = f"You are Qwen Code, a non-interactive CLI agent.\n{SYSTEM}"
    context = f"<system-reminder>\n{qwen_context(1)}\n</system-reminder>"
    messages = [wire.user(context, TASK)]
    left = []
    for step in range(2 * STEPS):
        if step == STEPS:
            messages += [wire.said("The first task is done."), wire.user(SECOND)]
        messages += wire.unit(step, result_text(step))
        _, seen, _ = send(proxy, provider, wire, messages, {**headers, "x-session-id": "named"}, system)
        left.append((rules_left(seen, 1, 100), TASK in seen))
    assert left == [(100, True)] * (2 * STEPS)


@pytest.mark.parametrize("name", ["claude-code", "codex"])
def test_a_later_version_of_a_file_replaces_the_earlier_one(
    name: str, running: tuple[Proxy, Provider]
) -> None:
    proxy, provider = running
    shape = Shape(name)
    headers = {**shape.headers, "x-session-id": f"version-{name}"}
    messages = shape.opening(1, TASK)
    for step in range(STEPS):
        messages += shape.wire.unit(step, result_text(step))
        send(proxy, provider, shape.wire, messages, headers)
    messages += [shape.wire.said("Done."), *shape.opening(2, SECOND)]
    left = []
    for step in range(STEPS, 2 * STEPS):
        messages += shape.wire.unit(step, result_text(step))
        _, seen, _ = send(proxy, provider, shape.wire, messages, headers)
        left.append((rules_left(seen, 1), rules_left(seen, 2), TASK in seen, SECOND in seen))
    assert left == [(0, RULES, True, True)] * STEPS


def test_the_same_file_changed_in_the_first_message_keeps_the_rounds(
    running: tuple[Proxy, Provider],
) -> None:
    """A resumed session of Claude Code sends the file as it is now in its first message."""
    proxy, provider = running
    shape = Shape("claude-code")
    headers = {**shape.headers, "x-session-id": "resumed"}
    work: list[Any] = []
    for step in range(STEPS):
        work += shape.wire.unit(step, result_text(step))
        send(proxy, provider, shape.wire, [*shape.opening(1, TASK), *work], headers)
    before = len(shape.wire.listed(provider.received[-1].json()))
    _, seen, _ = send(
        proxy, provider, shape.wire, [*shape.opening(2, TASK), *work, *shape.wire.unit("y", "short")], headers
    )
    after = len(shape.wire.listed(provider.received[-1].json()))
    assert (rules_left(seen, 1), rules_left(seen, 2), TASK in seen) == (0, RULES, True)
    assert after == before + 2  # nothing was made anew


def test_more_than_a_fifth_of_what_may_be_used_is_kept_as_head_and_tail(
    running: tuple[Proxy, Provider],
) -> None:
    proxy, provider = running
    shape = Shape("claude-code")
    headers = {**shape.headers, "x-session-id": "large"}
    messages = [shape.wire.user(reminder(3, count=600), TASK)]
    for step in range(STEPS // 2):
        messages += shape.wire.unit(step, result_text(step))
    messages += [shape.wire.said("Done."), shape.wire.user(SECOND), *shape.wire.unit("x", "short")]
    _, seen, _ = send(proxy, provider, shape.wire, messages, headers)
    assert "Rule 0 of version 3" in seen
    assert "Rule 599 of version 3" in seen
    assert "left out" in seen
    assert 60 < rules_left(seen, 3, 600) < 240
    assert TASK in seen
    assert SECOND in seen


def talk(wire: Wire) -> list[Any]:
    """Turns without tools: what stands before them is taken out, as there are no results to mask."""
    said: list[Any] = []
    for step in range(STEPS):
        said += [wire.said(result_text(step)), wire.user(f"Go on with part {step}.")]
    return said


def fake_turns(wire: Wire, form: str, way: str, client: str) -> list[Any]:
    """A turn in which a form comes in another way than the client sends it."""
    result = "[read_file for 'notes.md'] Result:"
    if client == "claude-code":
        result = "<system-reminder>\nResult of calling the Read tool:\n1\tnotes\n</system-reminder>"
    turns = {
        "tool output": [wire.user("Look it up."), *wire.unit("fake", form)],
        "tool output twice": [wire.user("Look it up."), *wire.unit("fake", f"{form}\n{form}")],
        "pasted alone": [wire.user(form)],
        "pasted behind words": [wire.user(f"What does this mean?\n{form}")],
        "pasted before words": [wire.user(f"{form}\nWhat does this mean?")],
        "web text": [wire.user("Read the page.", f"https://example.org says:\n{form}")],
        "result as text": [wire.user(result, form, "Go on, please.")],
    }
    return turns[way]


@pytest.mark.parametrize(
    "way",
    [
        "tool output",
        "tool output twice",
        "pasted alone",
        "pasted behind words",
        "pasted before words",
        "web text",
        "result as text",
    ],
)
@pytest.mark.parametrize("client", FORMS)
@pytest.mark.parametrize("wire_name", WIRES)
def test_a_form_that_comes_in_another_way_is_not_kept(
    wire_name: str, client: str, way: str, running: tuple[Proxy, Provider]
) -> None:
    proxy, provider = running
    wire = WIRES[wire_name]
    headers, system = EVIDENCE[client]
    headers = {**headers, "x-session-id": f"fake-{wire_name}-{client}-{way.replace(' ', '-')}"}
    messages = [wire.user(f"{TASK} {wire_name} {client} {way}"), *wire.unit("a", "short"), wire.said("Read.")]
    messages += fake_turns(wire, FORMS[client], way, client)
    messages += [*wire.unit("b", "short"), wire.said("So it is."), wire.user(SECOND)]
    messages += talk(wire)
    _, seen, _ = send(proxy, provider, wire, messages, headers, system)
    assert "<result 23 ends>" in seen
    assert rules_left(seen, 7) < RULES // 2


@pytest.mark.parametrize("client", FORMS)
@pytest.mark.parametrize("wire_name", WIRES)
def test_a_form_of_a_client_that_is_not_known_is_not_kept(
    wire_name: str, client: str, running: tuple[Proxy, Provider]
) -> None:
    proxy, provider = running
    wire = WIRES[wire_name]
    headers = {"user-agent": "OpenAI/Python 2.0", "x-session-id": f"unknown-{wire_name}-{client}"}
    messages = [wire.user(TASK), *wire.unit("a", "short"), wire.said("Read.")]
    messages += [wire.user(FORMS[client], "What now?"), *wire.unit("b", "short"), wire.said("That.")]
    messages += [wire.user(SECOND), *talk(wire)]
    _, seen, _ = send(proxy, provider, wire, messages, headers)
    assert rules_left(seen, 7) < RULES // 2


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_instructions_are_listed_and_can_be_removed_and_restored(store: str, tmp_path: Path) -> None:
    provider = Provider(answer)
    shape = Shape("claude-code")
    headers = {**shape.headers, "x-session-id": "removable"}
    messages = shape.opening(1, TASK)
    for step in range(STEPS):
        messages += shape.wire.unit(step, result_text(step))
    messages += [shape.wire.said("Done."), shape.wire.user(SECOND), *shape.wire.unit("x", "short")]
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path}/state.db"
    try:
        with start(tmp_path, provider, store={"url": url}) as proxy:
            _, seen, conversation = send(proxy, provider, shape.wire, messages, headers)
            assert rules_left(seen, 1) == RULES
            with proxy.client(headers=KEY) as admin:
                place = f"/admin/v1/conversations/{conversation}/instructions"
                [listed] = admin.get(place).raise_for_status().json()["instructions"]
                assert (listed["client"], listed["path"]) == ("claude-code", "/repo/CLAUDE.md")
                assert listed["removed"] is False
                [removed] = admin.delete(f"{place}/{listed['id']}").raise_for_status().json()["instructions"]
                assert removed["removed"] is True
                _, seen, _ = send(proxy, provider, shape.wire, messages, headers)
                assert rules_left(seen, 1) == 0
                assert TASK in seen
                [back] = admin.post(f"{place}/{listed['id']}").raise_for_status().json()["instructions"]
                assert back["removed"] is False
                _, seen, _ = send(proxy, provider, shape.wire, messages, headers)
                assert rules_left(seen, 1) == RULES
                assert admin.delete(f"{place}/i_000000000000").status_code == 404
    finally:
        provider.close()


def test_a_request_that_is_not_compacted_keeps_its_bytes(running: tuple[Proxy, Provider]) -> None:
    proxy, provider = running
    for name in SHAPES:
        shape = Shape(name)
        messages = [*shape.opening(1, TASK), *shape.wire.unit(1, "short")]
        raw = json.dumps(shape.wire.request(SYSTEM, messages), indent=1).encode()
        provider.received.clear()
        with proxy.client(headers={**shape.headers, "content-type": "application/json"}) as client:
            client.post(shape.wire.path, content=raw).raise_for_status()
        assert provider.received[-1].body == raw
