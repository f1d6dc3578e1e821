"""What every Python driver shares: what it is told, and how it says what came. Standard library only."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

URL = os.environ["BASE_URL"]
KEY = os.environ["KEY"]
MODEL = os.environ["MODEL"]
CONVERSATION: dict[str, Any] = json.loads(Path(os.environ["CONVERSATION"]).read_text("utf-8"))
INSTRUCTIONS: str = CONVERSATION["instructions"]
TOOL: dict[str, Any] = CONVERSATION["tool"]
TURNS: list[str] = CONVERSATION["turns"]

HELLO = "Say hello to Zürich 🌍."
LOOK_UP = 'Please look.\ncall lookup {"topic": "taxes"}'
FAULT = "x-demo-fault"
TIMEOUT_S = 0.7

Outcome = Mapping[str, Any]


def looked_up(topic: str) -> str:
    """What the tool gives."""
    found: str = CONVERSATION["results"][topic]
    return found


def topic_of(arguments: str) -> str:
    """What a call of the tool asks for."""
    topic: str = json.loads(arguments)["topic"]
    return topic


def said(text: str | None, calls: Iterable[tuple[str, Any]] = (), **more: Any) -> Outcome:
    """An answer; a call's arguments may be JSON text."""
    named = [[name, json.loads(given) if isinstance(given, str) else given] for name, given in calls]
    return {"text": text or "", "calls": named, **more}


def refused(error: BaseException, **more: Any) -> Outcome:
    """An error that the client raised; `status` and `message` are what it says of them."""
    status = getattr(error, "status_code", None)
    return {"error": type(error).__name__, "status": status, "message": str(error), **more}


def expecting(kind: type[BaseException], call: Callable[[], object]) -> Outcome:
    """The error that a call ends with; anything else is one of ours."""
    try:
        came = call()
    except kind as error:
        return refused(error)
    raise AssertionError(f"an error was expected, and this came: {came!r}")


def run(cases: Mapping[str, Callable[[], object]]) -> None:
    """Perform the cases asked for, else all; what a client prints of its own is no report."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for name in os.environ["CASES"].split() or cases:
            perform = cases[name]
            line = json.dumps({"case": name, "outcome": perform()}, ensure_ascii=True)
            out.write(f"{line}\n")
            out.flush()
            sys.stdin.readline()  # the frame has noted which requests came so far
