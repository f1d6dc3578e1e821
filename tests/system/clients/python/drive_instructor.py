"""instructor: answers as pydantic models, by way of tools, over both of OpenAI's wires."""

import asyncio
import json
from functools import partial
from typing import Any

import instructor  # type: ignore[import-not-found] # of the driver's environment
import openai
from instructor.core.exceptions import InstructorRetryException  # type: ignore[import-not-found] # likewise
from pydantic import BaseModel

from tests.system.clients.python.reporting import (
    CONVERSATION,
    FAULT,
    INSTRUCTIONS,
    KEY,
    MODEL,
    TURNS,
    URL,
    Outcome,
    expecting,
    run,
)


class Finding(BaseModel):
    """What was found."""

    topic: str
    row: int


def client(mode: Any) -> Any:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def wanted(topic: str) -> str:
    return f"Please answer.\ncall Finding {json.dumps({'topic': topic, 'row': 1})}"


def asked(mode: Any, messages: list[Any], **options: Any) -> Finding:
    found: Finding = client(mode).create(
        model=MODEL, response_model=Finding, messages=messages, max_retries=0, **options
    )
    return found


def structured(mode: Any) -> Outcome:
    return asked(mode, [{"role": "user", "content": wanted("taxes")}]).model_dump()


def waited(mode: Any) -> Outcome:
    async def performed() -> Outcome:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as plain:
            found = await instructor.from_openai(plain, mode=mode).create(
                model=MODEL,
                response_model=Finding,
                messages=[{"role": "user", "content": wanted("taxes")}],
                max_retries=0,
            )
            outcome: Outcome = found.model_dump()
            return outcome

    return asyncio.run(performed())


def limited(mode: Any) -> Outcome:
    messages = [{"role": "user", "content": wanted("taxes")}]
    return expecting(
        InstructorRetryException, lambda: asked(mode, messages, extra_headers={FAULT: "status=429"})
    )


def growing(mode: Any) -> Outcome:
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
    outcomes = []
    for turn, (topic, text) in zip(TURNS, CONVERSATION["results"].items(), strict=True):
        question = turn.partition("\n")[0]
        messages.append({"role": "user", "content": f"{question}\n{text}\n{wanted(topic)}"})
        found = asked(mode, messages)
        outcomes.append(found.model_dump())
        messages.append({"role": "assistant", "content": found.model_dump_json()})
    return {"turns": outcomes}


def cases(wire: str, mode: Any) -> dict[str, Any]:
    return {
        f"{wire}/structured": partial(structured, mode),
        f"{wire}/async": partial(waited, mode),
        f"{wire}/error-429": partial(limited, mode),
        f"{wire}/growing": partial(growing, mode),
    }


if __name__ == "__main__":
    run(cases("chat", instructor.Mode.TOOLS) | cases("responses", instructor.Mode.RESPONSES_TOOLS))
