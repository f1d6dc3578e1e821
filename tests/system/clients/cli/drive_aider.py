"""aider, without anybody before it: single messages, and a conversation at its prompt. It starts slowly."""

import json
import subprocess
import sys
from pathlib import Path

from tests.system.clients.python.reporting import HELLO, KEY, MODEL, TURNS, URL, Outcome, looked_up, run, said

COMMAND_LIMIT_S = 100
HISTORY = Path(".aider.chat.history.md")
NAME = f"openai/{MODEL}"
ALONE = (
    "--no-git", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-show-release-notes",
    "--no-pretty", "--no-fancy-input", "--no-suggest-shell-commands", "--no-detect-urls", "--yes-always",
    "--disable-playwright",
)  # fmt: skip
# Nothing of a repository is shown, nothing is edited, and aider itself summarises nothing.
ASKING = ("--chat-mode", "ask", "--map-tokens", "0", "--max-chat-history-tokens", "1000000")


def aider(*arguments: str, typed: str = "") -> list[str]:
    """What aider notes down of what it was answered; a line each."""
    HISTORY.unlink(missing_ok=True)
    reached = ("--model", NAME, "--openai-api-base", f"{URL}/v1", "--openai-api-key", KEY)
    command = [sys.executable, "-m", "aider", *reached, *ALONE, *ASKING, *arguments]
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return HISTORY.read_text("utf-8").splitlines()


def answers(notes: list[str]) -> list[str]:
    """What the model said: what is neither a heading, as what the user said is, nor a remark of aider's."""
    return [line.rstrip() for line in notes if line.strip() and not line.startswith(("#", ">"))]


def one() -> Outcome:
    [text] = answers(aider("--no-stream", "--message", HELLO))
    return said(text)


def pasted(turn: str) -> str:
    """A turn as one line, with what the tool would have given: aider offers the model no tools."""
    question, call = turn.splitlines()
    topic = json.loads(call.removeprefix("call lookup "))["topic"]
    return f"{question} The books say: {looked_up(topic)}"


def growing() -> Outcome:
    typed = "".join(f"{pasted(turn)}\n" for turn in TURNS)
    return {"texts": answers(aider("--stream", typed=f"{typed}/exit\n"))}


run({"chat/text": one, "chat/growing": growing})
