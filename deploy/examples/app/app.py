"""An example app. It has no code for compaction: only OPENAI_BASE_URL points to the proxy."""

# ruff: noqa: INP001, T201 - a script that prints

import os

from openai import OpenAI

client = OpenAI(default_headers={"x-session-id": os.environ.get("SESSION_ID", "example-app")})
messages = []
for question in ("My order is A-4711.", "Which colours are there?", "What was my order number?"):
    messages.append({"role": "user", "content": question})
    stream = client.chat.completions.create(
        model=os.environ.get("MODEL", "gpt-4o-mini"), messages=messages, stream=True
    )
    answer = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}\n", flush=True)
