"""An agent of LangGraph with three tools: `python langgraph_agent.py WIRE URL TASK`, again to go on."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from langchain_anthropic import ChatAnthropic  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from langgraph.checkpoint.sqlite import SqliteSaver  # type: ignore[import-not-found]
from langgraph.prebuilt import create_react_agent  # type: ignore[import-not-found]

STEPS = 1_000


def read_file(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def run_shell(command: str) -> str:
    """Run a command in a shell."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


def replace_text(path: str, old: str, new: str) -> str:
    """Replace a text in a file."""
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))
    return "replaced"


def make_model(wire: str, url: str) -> Any:
    if wire == "messages":
        return ChatAnthropic(model="claude-sonnet-4-5", base_url=url, api_key="key")
    return ChatOpenAI(
        model="gpt-5.4-mini", base_url=f"{url}/v1", api_key="key", use_responses_api=wire == "responses"
    )


wire, url, task = sys.argv[1:]
with SqliteSaver.from_conn_string("session.db") as saver:
    agent = create_react_agent(
        make_model(wire, url),
        [read_file, run_shell, replace_text],
        prompt="You work on files.\n\n" + Path("AGENTS.md").read_text(),
        checkpointer=saver,
    )
    config = {"configurable": {"thread_id": "one"}, "recursion_limit": STEPS}
    result = agent.invoke({"messages": [{"role": "user", "content": task}]}, config)
    sys.stdout.write(result["messages"][-1].text)
