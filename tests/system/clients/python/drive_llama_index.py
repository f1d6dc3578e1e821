"""LlamaIndex's OpenAILike, for providers that speak OpenAI's chat."""

import asyncio
from typing import Any

import openai
from llama_index.core.base.llms.types import (  # type: ignore[import-not-found] # of the driver's environment
    ChatMessage,
    MessageRole,
)
from llama_index.core.tools import FunctionTool  # type: ignore[import-not-found] # likewise
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-not-found] # likewise

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
    expecting,
    looked_up,
    run,
    said,
)


def lookup(topic: str) -> str:
    """Look something up in the books."""
    return looked_up(topic)


def model(**options: Any) -> Any:
    return OpenAILike(
        model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        context_window=100_000, max_retries=0, **options,
    )  # fmt: skip


LLM = model()
TOOL = FunctionTool.from_defaults(fn=lookup)


def user(text: str) -> Any:
    return ChatMessage(role=MessageRole.USER, content=text)


def calls_of(response: Any) -> list[Any]:
    found: list[Any] = LLM.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    return found


def answered(response: Any) -> Outcome:
    used = response.raw.usage
    calls = [(call.tool_name, call.tool_kwargs) for call in calls_of(response)]
    return said(response.message.content, calls, usage=[used.prompt_tokens, used.completion_tokens])


def streamed() -> Outcome:
    chunks = list(LLM.stream_chat([user(HELLO)]))
    return {"text": chunks[-1].message.content, "chunks": len(chunks)}


def asked_with_tool(history: list[Any]) -> Any:
    return LLM.chat_with_tools([TOOL], chat_history=history)


def growing() -> Outcome:
    history: list[Any] = [ChatMessage(role=MessageRole.SYSTEM, content=INSTRUCTIONS)]
    outcomes = []
    for turn in TURNS:
        history.append(user(turn))
        for _ in range(2):
            response = asked_with_tool(history)
            outcomes.append(answered(response))
            history.append(response.message)
            history += [
                ChatMessage(
                    role=MessageRole.TOOL,
                    content=looked_up(call.tool_kwargs["topic"]),
                    additional_kwargs={"tool_call_id": call.tool_id},
                )
                for call in calls_of(response)
            ]
    return {"turns": outcomes}


CASES = {
    "chat/text": lambda: answered(LLM.chat([user(HELLO)])),
    "chat/stream": streamed,
    "chat/tools": lambda: answered(asked_with_tool([user(LOOK_UP)])),
    "chat/async": lambda: answered(asyncio.run(LLM.achat([user(HELLO)]))),
    "chat/error-429": lambda: expecting(
        openai.RateLimitError, lambda: model(default_headers={FAULT: "status=429"}).chat([user(HELLO)])
    ),
    "chat/growing": growing,
}

if __name__ == "__main__":
    run(CASES)
