"""Conversations drawn by a seed, and how each wire writes them."""

import base64
import json
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

SEED = 20_261_123
WIRES = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}

_SYSTEM = "You are an agent that works in a repository. Be brief. Never push to the main branch."
_USER = (
    "Find out why {svc} returns {code} since {date}.",
    "Always use tabs in {path}, never spaces.",
    "Please raise the limit of {svc} to {n} and write a test for it.",
    "No, not {path}: the setting stands in {path2} now, and the port is {port}.",
    "From now on answer in one sentence. The invoice is {money}, the contact is {mail}.",
    "Der Bericht von {svc} ist leer. Bitte prüfe {path} und ändere nichts an der Datenbank.",
    "请检查 {path} 的配置，端口是 {port}，不要删除任何文件。谢谢。",
    "Undo the last change and run the tests of {svc} again with {n} workers.",
    "What was the commit that broke it? I think it was {commit}.",
    "Remember: the deadline is {date}, and {mail} decides.",
)
_SAID = (
    "I looked into {path}: the handler of {svc} raised ValueError at line {n}. I will change the guard next.",
    "The test of {svc} passes now. Commit {commit} holds the change; {path} was not touched.",
    "The limit in {path2} is {n}. Raising it needs a restart of {svc}, which takes {port} ms.",
    "Ich habe {path} geprüft: der Wert ist {n}, und {svc} antwortet mit {code}.",
    "已检查 {path}。端口 {port} 已被占用，错误代码 {code}。",
    "Decision: keep the retry in {svc}, because a second attempt after {n} ms has helped in {port} of {n} cases.",
)
_RESULT = (
    "{date} ERROR {svc} ConnectionError: pool exhausted (max={n}) in {path}:{port}\n",
    "def load_{n}(name):\n    return open('{path}').read()[:{port}]\n\n",
    '{{"service": "{svc}", "status": {code}, "commit": "{commit}", "mail": "{mail}"}}\n',
    "tests/{svc}/test_{n}.py::test_limit FAILED, exit code {port}\n",
)
_PROJECT = (
    "# claudeMd\nCodebase and user instructions are shown below.\n\nContents of /repo/CLAUDE.md (project instructions, "
    "checked into the codebase):\n\nUse make test. Version {n}.\n"
)


@dataclass
class Message:
    """A message of no wire.

    Attributes:
        role: system, user, assistant or tool.
        text: Its text.
        calls: Calls of tools: id, name, arguments as JSON.
        call_id: Of a tool's result: the call that it answers.
        image: Of a user's message: bytes of an image that goes with it.
    """

    role: str
    text: str
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    call_id: str = ""
    image: bytes = b""


@dataclass
class Conversation:
    """A conversation and how it is asked about.

    Attributes:
        number: Its number.
        messages: All messages; the first is the system's.
        stops: How many messages each request has, ascending.
        is_streamed: Whether its answers are event streams.
        branch: The request whose last user message is edited afterwards and sent again; -1: none.
        actions: Headers of single requests, by their number.
        has_id: Whether a header names the session.
        has_blanks: Whether its JSON has blanks, as Python writes it, or none.
    """

    number: int
    messages: list[Message]
    stops: list[int]
    is_streamed: bool
    branch: int
    actions: dict[int, list[tuple[str, str]]]
    has_id: bool
    has_blanks: bool


def _fill(chance: random.Random, text: str) -> str:
    return text.format(
        svc=chance.choice(("billing", "search", "mailer", "gateway")),
        code=chance.choice((404, 500, 502, 503)),
        date=f"2026-0{chance.randint(1, 9)}-{chance.randint(10, 28)}",
        path=f"src/{chance.choice(('app', 'core', 'store'))}/part_{chance.randint(1, 40)}.py",
        path2=f"/etc/service/{chance.choice(('main', 'limits'))}_{chance.randint(1, 9)}.yaml",
        n=chance.randint(2, 4_000),
        port=chance.randint(1_000, 9_999),
        money=f"${chance.randint(10, 9_999)}.{chance.randint(10, 99)}",
        mail=f"{chance.choice(('ana', 'li', 'tom'))}{chance.randint(1, 99)}@example.com",
        commit=f"{chance.getrandbits(28):07x}",
    )


def _png(chance: random.Random) -> bytes:
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (640).to_bytes(4, "big") + (480).to_bytes(4, "big")
    return head + b"\x08\x02\x00\x00\x00" + zlib.compress(chance.randbytes(600))


def draw_conversation(number: int, seed: int = SEED) -> Conversation:
    """Returns the conversation of that number: always the same for one seed."""
    chance = random.Random(f"{seed}/{number}")
    messages = [Message("system", f"{_SYSTEM} Session {number}.")]
    first = _fill(chance, chance.choice(_USER))
    if number % 8 == 3:
        first = f"<system-reminder>\n{_fill(chance, _PROJECT)}</system-reminder>\n{first}"
    turns = chance.randint(4, 9)
    calls = 0
    for turn in range(turns):
        text = first if turn == 0 else _fill(chance, chance.choice(_USER))
        image = _png(chance) if number % 10 == 7 and turn == 1 else b""
        messages.append(Message("user", text, image=image))
        for _ in range(chance.randint(0, 4)):
            together = chance.randint(1, 2)
            made = [
                (
                    f"call_{calls + n}",
                    chance.choice(("read", "shell")),
                    json.dumps({"path": f"part_{calls + n}.py"}),
                )
                for n in range(together)
            ]
            calls += 0 if number % 9 == 4 else together  # some clients use an id twice
            messages.append(
                Message(
                    "assistant", _fill(chance, chance.choice(_SAID)) if chance.random() < 0.5 else "", made
                )
            )
            for one, _name, _arguments in made:
                lines = chance.choice((2, 6, 14, 30)) if number % 13 != 5 else chance.choice((2, 160))
                result = "".join(_fill(chance, chance.choice(_RESULT)) for _ in range(lines))
                messages.append(Message("tool", result, call_id=one))
        messages.append(
            Message(
                "assistant",
                " ".join(_fill(chance, chance.choice(_SAID)) for _ in range(chance.randint(1, 9))),
            )
        )
    messages.append(Message("user", _fill(chance, chance.choice(_USER))))
    possible = [n + 1 for n, each in enumerate(messages) if each.role == "user"]
    possible += [
        n + 1
        for n, each in enumerate(messages[:-1])
        if each.role == "tool" and messages[n + 1].role != "tool"
    ]
    stops = sorted({*chance.sample(possible[2:], min(5, len(possible) - 2)), len(messages)})
    actions: dict[int, list[tuple[str, str]]] = {}
    if number % 5 == 1:
        actions[len(stops) - 2] = [("x-compaction", chance.choice(("force", "shadow", "bypass")))]
    if number % 6 == 2:
        actions[1] = [("x-compaction-pin", f"The staging port is {chance.randint(1_000, 9_999)}.")]
    return Conversation(
        number,
        messages,
        stops,
        is_streamed=number % 3 == 0,
        branch=chance.randrange(1, len(stops)) if number % 4 == 2 else -1,
        actions=actions,
        has_id=number % 7 != 6,
        has_blanks=number % 2 == 0,
    )


_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def _chat(messages: list[Message]) -> dict[str, Any]:
    out: list[dict[str, Any]] = []
    for each in messages:
        entry: dict[str, Any] = {"role": each.role, "content": each.text}
        if each.image:
            url = "data:image/png;base64," + base64.b64encode(each.image).decode()
            entry["content"] = [
                {"type": "text", "text": each.text},
                {"type": "image_url", "image_url": {"url": url}},
            ]
        if each.calls:
            entry["content"] = each.text or None
            entry["tool_calls"] = [
                {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
                for one, name, arguments in each.calls
            ]
        if each.call_id:
            entry["tool_call_id"] = each.call_id
        out.append(entry)
    tools = [
        {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": _SCHEMA}}
        for name in ("read", "shell")
    ]
    return {"messages": out, "tools": tools, "temperature": 0.2}


def _responses(messages: list[Message]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for each in messages:
        if each.role == "tool":
            items.append({"type": "function_call_output", "call_id": each.call_id, "output": each.text})
            continue
        kind = "output_text" if each.role == "assistant" else "input_text"
        parts: list[dict[str, Any]] = [{"type": kind, "text": each.text}]
        if each.image:
            url = "data:image/png;base64," + base64.b64encode(each.image).decode()
            parts.append({"type": "input_image", "image_url": url})
        if each.role == "system":
            continue
        if each.text:
            items.append({"type": "message", "role": each.role, "content": parts})
        items += [
            {"type": "function_call", "call_id": one, "name": name, "arguments": arguments}
            for one, name, arguments in each.calls
        ]
    tools = [{"type": "function", "name": name, "parameters": _SCHEMA} for name in ("read", "shell")]
    return {"instructions": messages[0].text, "input": items, "tools": tools, "store": False}


def _messages(messages: list[Message]) -> dict[str, Any]:
    out: list[dict[str, Any]] = []
    for each in messages[1:]:
        if each.role == "tool":
            block = {"type": "tool_result", "tool_use_id": each.call_id, "content": each.text}
            if out[-1]["role"] == "user" and isinstance(out[-1]["content"], list):
                out[-1]["content"].append(block)
            else:
                out.append({"role": "user", "content": [block]})
            continue
        content: Any = each.text
        if each.image:
            source = {
                "type": "base64",
                "media_type": "image/png",
                "data": base64.b64encode(each.image).decode(),
            }
            content = [{"type": "text", "text": each.text}, {"type": "image", "source": source}]
        if each.calls:
            content = [{"type": "text", "text": each.text}] if each.text else []
            content += [
                {"type": "tool_use", "id": one, "name": name, "input": json.loads(arguments)}
                for one, name, arguments in each.calls
            ]
        out.append({"role": each.role, "content": content})
    tools = [{"name": name, "input_schema": _SCHEMA} for name in ("read", "shell")]
    system = [{"type": "text", "text": messages[0].text, "cache_control": {"type": "ephemeral"}}]
    return {"system": system, "messages": out, "tools": tools, "max_tokens": 1_000}


def write_request(
    wire: str,
    messages: list[Message],
    model: str = "m",
    *,
    is_streamed: bool = False,
    has_blanks: bool = True,
) -> bytes:
    """Returns the body of a request with these messages.

    Args:
        wire: One of `WIRES`.
        messages: The messages; the first is the system's.
        model: Model that is asked.
        is_streamed: Whether the answer is to be an event stream.
        has_blanks: Whether JSON is written with blanks and escapes, or without.
    """
    inner = {"chat": _chat, "responses": _responses, "messages": _messages}[wire](messages)
    body: dict[str, Any] = {"model": model, **inner, **({"stream": True} if is_streamed else {})}
    if has_blanks:
        return json.dumps(body).encode()
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
