"""OpenHands' default agent: `python openhands_agent.py MODEL URL TASK`, again to go on."""

import sys
import uuid
from pathlib import Path

from openhands.sdk import LLM, Conversation  # type: ignore[import-not-found]
from openhands.tools.preset.default import get_default_agent  # type: ignore[import-not-found]

SESSION = uuid.UUID("00000000-0000-4000-8000-000000000001")

model, url, task = sys.argv[1:]
agent = get_default_agent(llm=LLM(model=model, base_url=url, api_key="key"), cli_mode=True)
conversation = Conversation(
    agent=agent,
    workspace=str(Path.cwd()),
    persistence_dir=str(Path.home() / "sessions"),
    conversation_id=SESSION,
)
conversation.send_message(task)
conversation.run()
