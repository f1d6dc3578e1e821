"""Rehearsals for people who look at the pages: each in a process of its own; no request waits for it."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from subprocess import PIPE
from typing import Any

from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ReplayFailedError, RequestRefusedError, UnreadableBodyError
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.replay.prompt_size import JsonObject
from compaction_proxy.replay.recordings import SHAPING, dump_json
from compaction_proxy.replay.runner import ReplayOptions
from compaction_proxy.wires.json.slices import find_members

AT_ONCE = 2
# Sections of the configuration that mean nothing to a rehearsal, which keeps everything in memory.
UNNEEDED = {"server", "store", "observability"}
LIMIT_S = 30.0
MAX_TOKENS = 1_000_000_000
# Of a failure so much is told.
MAX_LINE_CHARACTERS = 300
# What is imported there comes from where this process has it, not from the folder that it was started in.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from compaction_proxy.cli.replay_worker import main; main()"
)
COMMAND = (sys.executable, "-I", "-c", _PROGRAM, *sys.path)
BUSY = "Other rehearsals are under way; try again in a moment."
SLOW = f"The rehearsal took more than {LIMIT_S:.0f} s: send less of the conversation, or fewer strategies."


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """What is to be played.

    Attributes:
        conversation: Id of one whose messages are kept; empty: `members` hold it.
        members: The conversation as the members of a request body, each value as JSON.
        strategies: Names of strategies; none: the configured one.
        options: What is to be otherwise than configured.
    """

    conversation: str
    members: Mapping[str, bytes] = field(repr=False)
    strategies: tuple[str, ...] = ()
    options: ReplayOptions = field(default_factory=ReplayOptions)


def parse_job(raw: bytes) -> ReplayJob:
    """What a body asks for; the conversation in it is not decoded. Takes milliseconds for each megabyte.

    Args:
        raw: `{"messages": […], "tools": […]}` or `{"conversation": "c_…"}`, and with either as wanted
            `model`, `strategies`, `trigger_tokens`, `target_tokens` and `window`.

    Raises:
        RequestRefused: It makes no sense (400).
    """
    try:
        found = {name: raw[place.start : place.stop] for name, place in find_members(raw).items()}
        small = {name: json.loads(value) for name, value in found.items() if name not in _LARGE}
    except (UnreadableBodyError, ValueError, RecursionError):
        raise _build_refusal("The body is no JSON object.") from None
    conversation = small.get("conversation") or ""
    if not isinstance(conversation, str) or bool(conversation) == ("messages" in found):
        raise _build_refusal("messages or conversation: one of them")
    strategies = small.get("strategies") or []
    if not isinstance(strategies, list) or any(name not in STRATEGIES for name in map(str, strategies)):
        raise _build_refusal(f"strategies: a list of {', '.join(STRATEGIES)}")
    shaping = {name: value for name, value in found.items() if name in _LARGE}
    return ReplayJob(conversation, shaping, tuple(map(str, strategies)), _parse_options(small))


def _parse_options(small: Mapping[str, Any]) -> ReplayOptions:
    model = small.get("model")
    if model is not None and not isinstance(model, str):
        raise _build_refusal("model: a name")
    trigger, target, window = (
        _parse_tokens(small, name) for name in ("trigger_tokens", "target_tokens", "window")
    )
    return ReplayOptions(model or None, trigger, target, window)


def _parse_tokens(small: Mapping[str, Any], name: str) -> int | None:
    value = small.get(name)
    if value is not None and (type(value) is not int or not 0 < value <= MAX_TOKENS):
        raise _build_refusal(f"{name}: a number of tokens")
    return value


_LARGE = frozenset({"messages", *SHAPING})


def _build_refusal(message: str) -> RequestRefusedError:
    return RequestRefusedError(400, message, "invalid_request")


class ReplayJobRunner:
    """Has conversations played, two at once.

    Args:
        config: The configuration in force. None of its secrets leaves the process.
        load_conversation: Gives what is kept of a conversation as a request body.
        command: What plays. It is told on its standard input, and answers with a JSON object.
        limit_s: How long it may take, in seconds.
    """

    def __init__(
        self,
        config: Config,
        load_conversation: Callable[[str], Awaitable[JsonObject]],
        command: Sequence[str] = COMMAND,
        *,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._config = config
        self._load_conversation = load_conversation
        self._command = command
        self._limit_s = limit_s
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run_job(self, job: ReplayJob) -> list[JsonObject]:
        """The results as JSON values (`replay.result.to_fields`), one for each strategy.

        Raises:
            RequestRefused: It is no conversation (400) or not known (404), too little of it is kept (409),
                it took too long (413), or others are under way (429).
            RehearsalFailed: The process that plays has ended without an answer.
        """
        if self._slots.locked():
            raise RequestRefusedError(429, BUSY, "busy")
        async with self._slots:
            body_members = job.members
            if job.conversation:
                stored = await self._load_conversation(job.conversation)
                encoded = await asyncio.to_thread(_encode_members, stored)
                body_members = {**encoded, **body_members}
            answer = await self._run_process(self._encode_input(job, body_members))
        if "error" in answer:
            raise RequestRefusedError(400, str(answer["error"]), "not_a_conversation")
        results: list[JsonObject] = answer["results"]
        return results

    def _encode_input(self, job: ReplayJob, body_members: Mapping[str, bytes]) -> bytes:
        """What the process needs to know: a line of JSON, then the conversation.

        Secrets are masked where a configuration is written as JSON; a store's URL may hold one, too.
        """
        about = {
            "config": self._config.model_dump(mode="json", exclude_unset=True, exclude=UNNEEDED),
            "name": job.conversation or "conversation",
            "strategies": job.strategies or (self._config.compaction.strategy,),
            "wanted": asdict(job.options),
        }
        body = b",".join(b"%b:%b" % (dump_json(name), value) for name, value in body_members.items())
        return b"%b\n{%b}" % (dump_json(about), body)

    async def _run_process(self, input_bytes: bytes) -> Mapping[str, Any]:
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            async with asyncio.timeout(self._limit_s):
                stdout, stderr = await process.communicate(input_bytes)
        except TimeoutError:
            raise RequestRefusedError(413, SLOW, "too_large") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise ReplayFailedError(f"The rehearsal failed: {_extract_last_line(stderr, process.returncode)}")
        return _parse_output(stdout, stderr)


def _parse_output(stdout: bytes, stderr: bytes) -> Mapping[str, Any]:
    """The answer of a process that has ended well.

    Raises:
        RehearsalFailed: It is none.
    """
    try:
        output = json.loads(stdout)
    except ValueError:
        output = None
    if not isinstance(output, dict) or output.keys().isdisjoint({"results", "error"}):
        raise ReplayFailedError(f"The rehearsal gave no answer: {_extract_last_line(stderr)}")
    return output


def _extract_last_line(stderr: bytes, code: int = 0) -> str:
    """What a process said last on stderr, such as the error that ended it; else how it ended."""
    lines = stderr.decode("utf-8", "replace").split("\n")
    plain = ("".join(filter(str.isprintable, line)).strip() for line in reversed(lines))
    otherwise = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return next(filter(None, plain), otherwise)[:MAX_LINE_CHARACTERS]


def _encode_members(body: JsonObject) -> dict[str, bytes]:
    return {name: dump_json(value) for name, value in body.items()}
