"""Runs rehearsals that users start with the admin API or its web pages.

Each rehearsal runs in a separate process, so that it does not delay the requests that the proxy serves.
"""

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
from compaction_proxy.replay.provider import JsonObject
from compaction_proxy.replay.recordings import SHAPING_MEMBERS
from compaction_proxy.replay.runner import ReplayOptions
from compaction_proxy.wires.json.slices import find_members
from compaction_proxy.wires.json.values import encode_json

# Maximum number of rehearsals that run at the same time. The proxy refuses a further one with status 429.
MAX_PARALLEL_JOBS = 2
# Sections of the configuration that the proxy does not send to the subprocess of a rehearsal. A rehearsal
# does not need them, because it serves no clients and keeps all data in memory.
UNNEEDED_SECTIONS = {"server", "store", "observability"}
# Time limit of a rehearsal, in seconds. After this time, the proxy kills the subprocess and refuses the
# request for the rehearsal with status 413.
TIMEOUT_S = 30.0
# Largest trigger, target and context window, in tokens, that a request for a rehearsal may set. The proxy
# refuses a request with a larger number with status 400.
MAX_TOKENS = 1_000_000_000
# Maximum characters of an error message of the subprocess that the proxy reports. The end of a longer message
# is cut off.
MAX_LINE_CHARACTERS = 300
# The subprocess imports modules from the same folders as this process (`sys.path`), not from its working
# directory.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; from compaction_proxy.cli.replay_worker import main; main()"
)
COMMAND = (sys.executable, "-I", "-c", _PROGRAM, *sys.path)
BUSY_MESSAGE = "Other replays are running. Try again later."
SLOW_MESSAGE = f"The replay took more than {TIMEOUT_S:.0f} s. Send fewer messages or fewer strategies."


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """A conversation to replay, with strategies and options.

    Attributes:
        conversation: Id of a stored conversation; empty if `members` holds the conversation.
        members: Members of a request body, such as `messages` and `tools`, by name, each value as JSON. If
            `conversation` is set, they replace the members of the stored conversation that have the same
            names.
        strategies: Names of the strategies to apply; empty for the configured strategy.
        options: Settings that differ from the configuration.
    """

    conversation: str
    members: Mapping[str, bytes] = field(repr=False)
    strategies: tuple[str, ...] = ()
    options: ReplayOptions = field(default_factory=ReplayOptions)


def parse_job(raw: bytes) -> ReplayJob:
    """Parses a request for a rehearsal.

    The function does not decode the messages and tools, so it takes only milliseconds per megabyte.

    Args:
        raw: The request body: `{"messages": […], "tools": […]}` or `{"conversation": "c_…"}`. Both forms may
            also have `model`, `strategies`, `trigger_tokens`, `target_tokens` and `window`.

    Raises:
        RequestRefusedError: With status 400 if the body is invalid.
    """
    try:
        values = {name: raw[place.start : place.stop] for name, place in find_members(raw).items()}
        small = {name: json.loads(value) for name, value in values.items() if name not in _LARGE}
    except (UnreadableBodyError, ValueError, RecursionError):
        raise _build_refusal("The request body is not a JSON object.") from None
    conversation = small.get("conversation") or ""
    if not isinstance(conversation, str) or bool(conversation) == ("messages" in values):
        raise _build_refusal("set either messages or conversation")
    strategies = small.get("strategies") or []
    if not isinstance(strategies, list) or any(name not in STRATEGIES for name in map(str, strategies)):
        raise _build_refusal(f"strategies: expected a list of {', '.join(STRATEGIES)}")
    shaping = {name: value for name, value in values.items() if name in _LARGE}
    return ReplayJob(conversation, shaping, tuple(map(str, strategies)), _parse_options(small))


def _parse_options(small: Mapping[str, Any]) -> ReplayOptions:
    model = small.get("model")
    if model is not None and not isinstance(model, str):
        raise _build_refusal("model: expected a name")
    tokens: dict[str, Any] = {name: small.get(name) for name in ("trigger_tokens", "target_tokens", "window")}
    for name, value in tokens.items():
        if value is not None and (type(value) is not int or not 0 < value <= MAX_TOKENS):
            raise _build_refusal(f"{name}: expected a number of tokens")
    return ReplayOptions(model=model or None, **tokens)


_LARGE = frozenset({"messages", *SHAPING_MEMBERS})


def _build_refusal(message: str) -> RequestRefusedError:
    return RequestRefusedError(400, message, "invalid_request")


class ReplayJobRunner:
    """Replays conversations in subprocesses, at most `MAX_PARALLEL_JOBS` at a time.

    Args:
        config: Configuration of the proxy. Its secrets are not sent to the subprocess.
        load_conversation: Takes the id of a conversation, and returns the stored part of the conversation as
            a decoded request body.
        command: Command line of the subprocess. The subprocess reads the job from its standard input, and
            writes a JSON object to its standard output.
        timeout_s: Time limit of the subprocess, in seconds.
    """

    def __init__(
        self,
        config: Config,
        load_conversation: Callable[[str], Awaitable[JsonObject]],
        command: Sequence[str] = COMMAND,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._config = config
        self._load_conversation = load_conversation
        self._command = command
        self._limit_s = timeout_s
        self._slots = asyncio.Semaphore(MAX_PARALLEL_JOBS)

    async def run_job(self, job: ReplayJob) -> list[JsonObject]:
        """Replays a conversation. Returns one result for each strategy (`runner.ReplayResult.to_fields`).

        Raises:
            RequestRefusedError: With status 400 if the conversation is invalid, 404 if it is unknown, 409 if
                too little of it is stored, 413 if the rehearsal takes too long, or 429 if `MAX_PARALLEL_JOBS`
                rehearsals are running.
            ReplayFailedError: If the subprocess ended with an error or without a valid result.
        """
        if self._slots.locked():
            raise RequestRefusedError(429, BUSY_MESSAGE, "busy")
        async with self._slots:
            body_members = job.members
            if job.conversation:
                stored = await self._load_conversation(job.conversation)
                encoded = await asyncio.to_thread(
                    lambda: {name: encode_json(stored[name]) for name in stored}
                )
                body_members = {**encoded, **body_members}
            answer = await self._run_process(self._encode_input(job, body_members))
        if "error" in answer:
            raise RequestRefusedError(400, str(answer["error"]), "not_a_conversation")
        return list(answer["results"])

    def _encode_input(self, job: ReplayJob, body_members: Mapping[str, bytes]) -> bytes:
        """Encodes the input of the subprocess: a line of JSON, and then a request body in JSON.

        The line contains the configuration, the strategies and the options. Asterisks replace the secrets of
        the configuration. The section `store` is left out, because its URL may contain a password, which
        asterisks would not replace.
        """
        header = {
            "config": self._config.model_dump(mode="json", exclude_unset=True, exclude=UNNEEDED_SECTIONS),
            "name": job.conversation or "conversation",
            "strategies": job.strategies or (self._config.compaction.strategy,),
            "wanted": asdict(job.options),
        }
        body = b",".join(b"%b:%b" % (encode_json(name), value) for name, value in body_members.items())
        return b"%b\n{%b}" % (encode_json(header), body)

    async def _run_process(self, input_bytes: bytes) -> Mapping[str, Any]:
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            async with asyncio.timeout(self._limit_s):
                stdout, stderr = await process.communicate(input_bytes)
        except TimeoutError:
            raise RequestRefusedError(413, SLOW_MESSAGE, "too_large") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise ReplayFailedError(f"The replay failed: {_extract_last_line(stderr, process.returncode)}")
        return _parse_output(stdout, stderr)


def _parse_output(stdout: bytes, stderr: bytes) -> Mapping[str, Any]:
    """Parses the output of a process that ended without an error. Returns the JSON object.

    Raises:
        ReplayFailedError: If the output is not a JSON object with a key `results` or `error`.
    """
    try:
        output = json.loads(stdout)
    except ValueError:
        output = None
    if not isinstance(output, dict) or output.keys().isdisjoint({"results", "error"}):
        raise ReplayFailedError(f"The replay returned no result: {_extract_last_line(stderr)}")
    return output


def _extract_last_line(stderr: bytes, code: int = 0) -> str:
    """Returns the last line of `stderr` that is not blank, cut to `MAX_LINE_CHARACTERS` characters.

    The last line is usually the error that ended the process. If all lines are blank, returns a text with the
    exit code, or with the signal that ended the process.
    """
    lines = stderr.decode("utf-8", "replace").split("\n")
    plain = ("".join(filter(str.isprintable, line)).strip() for line in reversed(lines))
    otherwise = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return next(filter(None, plain), otherwise)[:MAX_LINE_CHARACTERS]
