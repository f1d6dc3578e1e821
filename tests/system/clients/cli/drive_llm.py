"""llm: chat completions and, where a model's entry says so, responses; each case a command of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.system.clients.python.reporting import (
    FAULT,
    HELLO,
    INSTRUCTIONS,
    KEY,
    LOOK_UP,
    MODEL,
    TURNS,
    URL,
    Outcome,
    run,
    said,
)  # fmt: skip

COMMAND_LIMIT_S = 60
TOOLS = ("--functions", str(Path(__file__).parent / "books.py"))
# What stands before what is typed, and so before its answer: typing leaves no trace.
PROMPT = "\n> "


def entry(wire: str, trouble: str = "") -> dict[str, object]:
    """A model of `extra-openai-models.yaml`."""
    return {
        "model_id": f"{wire}{trouble}",
        "model_name": MODEL,
        "api_base": f"{URL}/v1",
        "supports_tools": True,
        "responses": wire == "responses",
        "headers": {FAULT: f"status={trouble}"} if trouble else {},
    }


def llm(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """What a command comes to; what is `said` is typed into it."""
    command = [sys.executable, "-m", "llm", *arguments, "--key", KEY]
    return subprocess.run(
        command, input=said, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )


def answer(wire: str, *arguments: str) -> Outcome:
    done = llm("-m", wire, *arguments)
    assert done.returncode == 0, done.stderr
    return said(done.stdout.rstrip("\n"))


def failure(model: str) -> Outcome:
    done = llm("-m", model, HELLO)
    return {"error": done.returncode, "message": done.stderr}


def growing(wire: str) -> Outcome:
    """One conversation at its prompt; a turn of several lines is typed between two words."""
    typed = "".join(f"!multi\n{turn}\n!end\n" for turn in TURNS)
    done = llm("chat", "-m", wire, "-s", INSTRUCTIONS, *TOOLS, said=f"{typed}quit\n")
    assert done.returncode == 0, done.stderr
    return {"texts": [text.strip() for text in done.stdout.split(PROMPT)[1:] if text.strip()]}


def cases(wire: str) -> dict[str, Callable[[], Outcome]]:
    return {
        f"{wire}/text": partial(answer, wire, "--no-stream", HELLO),
        f"{wire}/stream": partial(answer, wire, HELLO),
        f"{wire}/tools": partial(answer, wire, "--no-stream", *TOOLS, LOOK_UP),
        f"{wire}/stream-tools": partial(answer, wire, *TOOLS, LOOK_UP),
        f"{wire}/error-400": partial(failure, f"{wire}400"),
        f"{wire}/growing": partial(growing, wire),
    }


# YAML reads JSON.
MODELS = [entry(wire, trouble) for wire in ("chat", "responses") for trouble in ("", "400")]
Path("extra-openai-models.yaml").write_text(json.dumps(MODELS), "utf-8")
run({**cases("chat"), **cases("responses")})
