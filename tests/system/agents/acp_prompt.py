"""Sends one prompt to an agent that speaks the Agent Client Protocol on its standard streams.

`python acp_prompt.py PROMPT COMMAND...` keeps the id of the session in the home folder, and loads that
session when it is run again. Whatever the agent asks to be allowed is allowed.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

IDS = itertools.count(1)


def send_message(agent: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert agent.stdin is not None
    agent.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    agent.stdin.flush()


def call_method(agent: subprocess.Popen[str], method: str, **params: Any) -> dict[str, Any]:
    """Calls a method of the agent and returns its result; what the agent asks meanwhile is answered."""
    number = next(IDS)
    send_message(agent, {"id": number, "method": method, "params": params})
    assert agent.stdout is not None
    for line in agent.stdout:
        if not line.startswith("{"):
            sys.stdout.write(line)
            continue
        message = json.loads(line)
        if "method" in message:
            answer_agent(agent, message)
        elif message.get("id") == number:
            if "error" in message:
                sys.exit(f"error: {message['error']}")
            return dict(message["result"] or {})
    sys.exit("error: the agent has ended")


def answer_agent(agent: subprocess.Popen[str], message: dict[str, Any]) -> None:
    if "id" not in message:
        update = message["params"].get("update", {})
        if update.get("sessionUpdate") == "agent_message_chunk":
            sys.stdout.write(update["content"].get("text", ""))
    elif message["method"] == "session/request_permission":
        options = message["params"]["options"]
        chosen = next(each for each in options if each["kind"].startswith("allow"))
        outcome = {"outcome": "selected", "optionId": chosen["optionId"]}
        send_message(agent, {"id": message["id"], "result": {"outcome": outcome}})
    else:
        send_message(agent, {"id": message["id"], "error": {"code": -32601, "message": "not supported"}})


def main(prompt: str, command: list[str]) -> None:
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        folder, kept = str(Path.cwd()), Path.home() / ".acp-session"
        call_method(agent, "initialize", protocolVersion=1, clientCapabilities={})
        if kept.exists():
            session = kept.read_text()
            call_method(agent, "session/load", sessionId=session, cwd=folder, mcpServers=[])
        else:
            session = call_method(agent, "session/new", cwd=folder, mcpServers=[])["sessionId"]
            kept.write_text(session)
        ended = call_method(
            agent, "session/prompt", sessionId=session, prompt=[{"type": "text", "text": prompt}]
        )
        sys.stdout.write(f"\nstop reason: {ended.get('stopReason')}\n")
    finally:
        agent.kill()
        agent.wait()


main(sys.argv[1], sys.argv[2:])
