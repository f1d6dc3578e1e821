"""openai-python and `POST /v1/compact`, as docs/compact.md shows it."""

import json
import re
from pathlib import Path
from typing import Any

import httpx

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "compact.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The guide's examples in a language."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_official_sdk_sends_what_came_back_as_its_next_request(
    client: Any, stack: Any, key: str, conversation: Any
) -> None:
    named = {"client": client, "model": "demo-agent", "messages": conversation(20)}
    [example] = blocks("python")
    exec(compile(example, "docs/compact.md", "exec"), named)
    report = named["compacted"]["report"]
    assert (report["status"], report["summary_model"]) == ("applied", "demo-summary")
    assert report["tokens_after"] <= 3_000 < report["tokens_before"]
    assert named["answer"].choices[0].message.content
    *_, last = stack.seen(key)
    assert last.json()["messages"][:-1] == named["compacted"]["messages"]


def test_the_guide_s_request_is_answered_in_its_shape(stack: Any, key: str) -> None:
    [command] = blocks("sh")
    [shown] = blocks("json")
    body = command.partition("<<'JSON'\n")[2].removesuffix("JSON\n")
    answer = httpx.post(
        f"{stack.url}/compact", content=body, headers={"authorization": f"Bearer {key}"}, trust_env=False
    )
    told, promised = answer.json(), json.loads(shown)
    assert (answer.status_code, told.keys()) == (200, promised.keys())
    assert told["report"].keys() == promised["report"].keys()
    assert told["messages"] == json.loads(body)["messages"]
    assert (told["report"]["status"], told["report"]["reason"]) == ("none", None)  # it is under its target
