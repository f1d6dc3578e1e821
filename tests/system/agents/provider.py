"""A scripted provider that drives a client's own tools, and refuses what a strict provider refuses.

It counts a token for every four bytes of a request. A summary call of the proxy gets a summary; a request
without tools, such as one for a title, gets a short text; any other request is the next step of the session.
"""

import gzip
import json
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import brotli

from tests.system.agents.recorder import EXCHANGE_HEADER, Exchange
from tests.system.agents.wires import WIRES, Call, Move, Wire, begins_with_user, count_tokens
from tests.system.black_box import Provider, Received, Reply

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

REQUESTS_PER_TASK = 40
PART_CHARACTERS = 6_000
# What only summary calls of the proxy hold: the two forms of a transcript, and the aligned form.
SUMMARY_MARKS = (
    "## Messages to Summarize",
    "## Runs to Summarize",
    "The conversation is everything above this message.",
)
Counting = Literal["prompt", "sum"]
Kind = Literal["step", "summary", "side"]


def write_part(number: int) -> str:
    """The text of a file: English lines, each of which stands nowhere else."""
    lines = [f"<part {number:03} begins>"]
    while sum(map(len, lines)) < PART_CHARACTERS:
        k = len(lines)
        lines.append(
            f"Part {number:03}, line {k:02}: worker {(number * 37 + k * 11) % 991} "
            f"reads job {number * 100 + k} "
            "from the queue and writes its result into the table of reports."
        )
    return "\n".join([*lines, f"<part {number:03} ends>"])


def write_task(number: int) -> str:
    """What the user asks for, in the two tasks of a session."""
    return (
        f"Task {number}: read the parts of the report in notes/, one after the other, and keep state.txt "
        "up to date. Do not skip a part, and do not change the parts themselves. "
        f"The budget of task {number} is {number * 4100} dollars, its owner is desk {number * 17}, "
        f"and its reports go to room {number * 303}. Say when all is read."
    )


def write_instructions() -> str:
    """The project's instructions: a rule on each line."""
    rules = (
        f"- RULE-{k:02}: table {k * 13 % 97} of the reports is written by desk {k * 7 % 31} alone, "
        f"and room {k + 200} is told before it changes."
        for k in range(40)
    )
    return "\n".join(["# Rules of this project", "", *rules, ""])


def fill_workspace(folder: Path, instructions_file: str) -> None:
    """A repository with the files that the session reads and edits."""
    (folder / "notes").mkdir(parents=True)
    for number in range(2 * REQUESTS_PER_TASK):
        (folder / "notes" / f"part-{number:03}.txt").write_text(write_part(number))
    (folder / "state.txt").write_text("state: 0\n")
    path = folder / instructions_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_instructions())
    identity = ("-c", "user.name=Agents", "-c", "user.email=agents@example.org")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "Begin")):
        subprocess.run(["git", *identity, *command], cwd=folder, check=True)


@dataclass(frozen=True)
class Tools:
    """How a client's tools are called. An edit gets a path, the old text and the new one."""

    read: Callable[[str], Call]
    shell: Callable[[str], Call]
    edit: Callable[[str, str, str], Call]


def plan_move(tools: Tools, workspace: Path, step: int) -> Move:
    """What the model does in a step of the session, counted from 0 over both tasks."""
    place = step % REQUESTS_PER_TASK
    if place == REQUESTS_PER_TASK - 1:
        return Move(f"All parts of task {step // REQUESTS_PER_TASK + 1} are read.")
    path, state = f"{workspace}/notes/part-{step:03}.txt", f"{workspace}/state.txt"
    if place == 0:
        return Move("I look at the state first.", tools.read(state))
    if place % 5 == 3:
        return Move(f"Step {step}: I show {path}.", tools.shell(f"echo step {step}; cat {path}"))
    if place % 10 == 9:
        call = tools.edit(state, f"state: {_state_before(step)}", f"state: {step}")
        return Move(f"Step {step}: I note how far I am.", call)
    return Move(f"Step {step}: I read {path}.", tools.read(path))


Plan = Callable[[Tools, Path, int], Move]


def _state_before(step: int) -> int:
    """The number that state.txt holds before the edit of a step."""
    edits = [k for k in range(step) if k % REQUESTS_PER_TASK % 10 == 9 and (k + 1) % REQUESTS_PER_TASK]
    return edits[-1] if edits else 0


@dataclass(frozen=True)
class Forwarded:
    """A request that reached the provider.

    Attributes:
        kind: A step of the session, a summary call of the proxy, or a side call of the client.
        exchange: Number of the client's request that it belongs to; None where the proxy made it.
        body: Its decoded bytes.
        raw: Its bytes as they came.
        tokens: Its size.
        faults: Why a strict provider calls it invalid.
        is_too_long: Whether it was refused for its length.
    """

    kind: Kind
    exchange: int | None
    body: bytes
    raw: bytes
    tokens: int
    faults: tuple[str, ...]
    is_too_long: bool


def decode_body(body: bytes, coding: str) -> bytes:
    """The bytes behind a content coding."""
    if coding == "zstd":
        return bytes(zstd.decompress(body))
    if coding == "gzip":
        return gzip.decompress(body)
    if coding == "br":
        return bytes(brotli.decompress(body))
    return zlib.decompress(body) if coding == "deflate" else body


def find_wire(path: str) -> Wire | None:
    """The wire of a request's path; None where it carries no conversation."""
    endings = {"/chat/completions": "chat", "/responses": "responses", "/v1/messages": "messages"}
    name = next((name for end, name in endings.items() if path.partition("?")[0].endswith(end)), None)
    return None if name is None else WIRES[name]


class AgentProvider:
    """The provider of one session.

    Args:
        tools: How the client's tools are called.
        workspace: The folder that the client works in.
        window: Tokens that a request may have.
        counting: `prompt` counts the request alone against the window, `sum` its `max_tokens` too.
        is_step: Tells a step of the session from a side call; by default what has tools is one.
        plan: What the model does in a step.

    Attributes:
        url: Base URL, without /v1.
        forwarded: The requests with a conversation so far, oldest first.
        steps: Steps of the session that were answered.
        exchanges: The client's own requests, once it is known who records them.
        last_step: The step with which the task under way ends.
        state: What state.txt holds once the client has made the edits that it was asked for.
    """

    def __init__(
        self,
        tools: Tools,
        workspace: Path,
        window: int,
        counting: Counting,
        is_step: Callable[[Any], bool] | None = None,
        plan: Plan = plan_move,
    ) -> None:
        self.forwarded: list[Forwarded] = []
        self.exchanges: Sequence[Exchange] = ()
        self.steps = 0
        self.last_step = REQUESTS_PER_TASK - 1
        self._tools, self._workspace, self._plan = tools, workspace, plan
        self._window, self._counting = window, counting
        self._is_step = is_step or (lambda body: bool(body.get("tools")))
        self._lock = threading.Lock()
        self._numbers = 0
        self.state = ""
        self._provider = Provider(self._answer)
        self.url = self._provider.url.removesuffix("/v1")

    def begin_task(self, number: int) -> None:
        """Let the next step be the first of a task, counted from 0."""
        self.steps = number * REQUESTS_PER_TASK
        self.last_step = self.steps + REQUESTS_PER_TASK - 1

    def close(self) -> None:
        self._provider.close()

    def _answer(self, request: Received) -> Reply:
        wire = find_wire(request.path) if request.method == "POST" else None
        if wire is not None:
            with self._lock:
                return self._answer_conversation(request, wire)
        if request.path.endswith("/count_tokens"):
            return Reply(body=json.dumps({"input_tokens": count_tokens(request.body)}).encode())
        if request.path.partition("?")[0].endswith("/models"):
            return Reply(body=b'{"object": "list", "data": []}')
        return Reply(404, b'{"error": {"message": "no such path"}}')

    def _answer_conversation(self, request: Received, wire: Wire) -> Reply:
        raw = request.body
        text = decode_body(raw, request.headers.get("content-encoding", ""))
        body = json.loads(text)
        kind = self._find_kind(wire, body)
        tokens = count_tokens(text)
        asked = wire.get_max_tokens(body) if self._counting == "sum" else 0
        is_too_long = tokens + asked > self._window
        number = None if kind == "summary" else request.headers.get(EXCHANGE_HEADER)
        exchange = None if number is None else int(number)
        faults = self._find_faults(wire, body, exchange) if kind == "step" else ()
        self.forwarded.append(Forwarded(kind, exchange, text, raw, tokens, faults, is_too_long))
        if is_too_long:
            return wire.make_refusal(body, self._window, tokens, asked)
        if faults:
            return wire.make_error("; ".join(faults))
        self._numbers += 1
        return wire.make_answer(body, self._make_move(kind, wire, body), self._numbers, tokens)

    def _find_faults(self, wire: Wire, body: Any, exchange: int | None) -> tuple[str, ...]:
        """What is invalid; a conversation begins with the user wherever the client's own does."""
        faults = wire.find_faults(body)
        if self.exchanges and exchange is not None and not begins_with_user(wire, body):
            client = self.exchanges[exchange]
            own = json.loads(decode_body(client.body, client.headers.get("content-encoding", "")))
            if begins_with_user(wire, own):
                faults.append("the conversation does not begin with the user any more")
        return tuple(faults)

    def _find_kind(self, wire: Wire, body: Any) -> Kind:
        last = wire.list_items(body)[-1:]
        asked = "\n".join(text for item in last for text in wire.list_texts(item))
        if any(mark in asked for mark in SUMMARY_MARKS):
            return "summary"
        return "step" if self._is_step(body) else "side"

    def _make_move(self, kind: Kind, wire: Wire, body: Any) -> Move:
        if kind == "side":
            return Move("Parts of a report")
        if kind == "summary":
            return Move(
                _summarise(
                    "\n".join(text for item in wire.list_items(body) for text in wire.list_texts(item))
                )
            )
        if self.steps > self.last_step:  # the task has ended
            return Move("That is all.")
        move = self._plan(self._tools, self._workspace, self.steps)
        self.steps += 1
        edits = re.findall(r"state: \d+", json.dumps(asdict(move)))
        self.state = edits[-1] if edits else self.state
        return move


def _summarise(asked: str) -> str:
    """A short record of what the transcript holds, under each mark that the call names."""
    paths = sorted(set(re.findall(r"notes/part-\d{3}\.txt", asked)))
    lines = [f"- I read {path}." for path in paths] or ["- The work goes on."]
    text = "\n".join(["### D. State of the work", *lines])
    marks = re.findall(r"^=== RUN \d+ ===$", asked, re.MULTILINE)
    return "\n".join(f"{mark}\n{text}" for mark in marks) or text
