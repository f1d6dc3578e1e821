"""LangChain: its OpenAI models over both wires, and its Anthropic model."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic  # type: ignore[import-not-found] # of the driver's environment
import openai
from langchain_anthropic import ChatAnthropic  # type: ignore[import-not-found] # likewise
from langchain_core.messages import (  # type: ignore[import-not-found] # likewise
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found] # likewise
from pydantic import BaseModel

from tests.system.clients.python.reporting import (
    FAULT,
    HELLO,
    INSTRUCTIONS,
    KEY,
    LOOK_UP,
    MODEL,
    TOOL,
    TURNS,
    URL,
    Outcome,
    expecting,
    looked_up,
    run,
    said,
)

FUNCTION = {"type": "function", "function": TOOL}
OUTPUT_TOKENS = 400
# Its models share their connections, which belong to the loop that they were made in.
LOOP = asyncio.new_event_loop()


class City(BaseModel):
    """A city."""

    name: str
    degrees: int


def over_openai(*, responses: bool, **options: Any) -> Any:
    more: dict[str, Any] = {"store": False} if responses else {}
    return ChatOpenAI(
        base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_retries=0, use_responses_api=responses,
        **more, **options,
    )  # fmt: skip


def over_anthropic(**options: Any) -> Any:
    return ChatAnthropic(
        base_url=URL, api_key=KEY, model=MODEL, max_retries=0, max_tokens=OUTPUT_TOKENS, **options
    )


def answered(message: Any) -> Outcome:
    used = message.usage_metadata or {}  # a stream is not asked for it elsewhere than at OpenAI
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    return said(str(message.text), calls, usage=[used.get("input_tokens"), used.get("output_tokens")])


def streamed(model: Any) -> Outcome:
    chunks = list(model.stream(HELLO))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return {**answered(whole), "chunks": len(chunks)}


def structured(model: Any, **options: Any) -> Outcome:
    found = model.with_structured_output(City, **options).invoke(
        'Please answer.\ncall City {"name": "Zürich", "degrees": 21}'
    )
    return said(None, [("City", found.model_dump())])


def growing(model: Any) -> Outcome:
    bound = model.bind_tools([FUNCTION])
    messages: list[Any] = [SystemMessage(INSTRUCTIONS)]
    outcomes = []
    for turn in TURNS:
        messages.append(HumanMessage(turn))
        for _ in range(2):
            answer = bound.invoke(messages)
            outcomes.append(answered(answer))
            messages.append(answer)
            messages += [
                ToolMessage(looked_up(call["args"]["topic"]), tool_call_id=call["id"])
                for call in answer.tool_calls
            ]
    return {"turns": outcomes}


def cases(wire: str, make: Callable[..., Any], limited: type[Exception], **how: Any) -> dict[str, Any]:
    model = make()
    return {
        f"{wire}/text": lambda: answered(model.invoke(HELLO)),
        f"{wire}/stream": lambda: streamed(model),
        f"{wire}/tools": lambda: answered(model.bind_tools([FUNCTION]).invoke(LOOK_UP)),
        f"{wire}/structured": lambda: structured(model, **how),
        f"{wire}/async": lambda: answered(LOOP.run_until_complete(model.ainvoke(HELLO))),
        f"{wire}/error-429": lambda: expecting(
            limited, lambda: make(default_headers={FAULT: "status=429"}).invoke(HELLO)
        ),
        f"{wire}/growing": lambda: growing(model),
    }


if __name__ == "__main__":
    run(
        cases("chat", partial(over_openai, responses=False), openai.RateLimitError, method="function_calling")
        | cases(
            "responses",
            partial(over_openai, responses=True),
            openai.RateLimitError,
            method="function_calling",
        )
        | cases("messages", over_anthropic, anthropic.RateLimitError)
    )
