"""What clients name themselves, their models and their paths cannot make a line of the log, or hide one."""

# ruff: noqa: E501 - one case a line

import json
import time
from typing import Any

FORGED = [
    '\n{"level":"error","event":"forged"}\n', "\r\nforged", "\x1b[2J\x1b[31mforged", "\u2028forged\u2029", "\x85forged\x0b\x0c",
    "\x00forged", '","event":"forged","x":"', "\ud800forged", "forged" * 60, "Bearer sk-forged-by-nobody",
]  # fmt: skip
SAID = "The service reads its queue and writes a report. " * 12


def _body(model: str, session: int) -> bytes:
    said = [
        {"role": ("user", "assistant")[at % 2], "content": f"{session}.{at}: {SAID}", "name": model}
        for at in range(9)
    ]
    return json.dumps({"model": model, "messages": said, "user": model}).encode()


def test_each_line_is_one_event_and_there_are_as_many_as_compactions(proxy: Any) -> None:
    sent = 0
    for number, forged in enumerate(FORGED):
        raw = forged.encode("utf-8", "surrogatepass")
        value = raw.translate(None, bytes([*range(32), 127]))  # else it is no header at all
        for path in ("/v1/chat/completions", f"/{''.join(f'%{code:02x}' for code in raw)}/chat/completions"):
            sent += 1
            body = _body(forged, sent)
            fields = (b"x-session-id: %d" % number + value, b"user-agent: " + value, b"x-compaction: force")
            status, head, _ = proxy.post(path, body, *fields)
            assert status == 200
            assert b"x-compaction-status: applied" in head, (forged, head)
            proxy.ask(
                b"GET /%b HTTP/1.1\r\nconnection: close\r\nhost: %b\r\n\r\n" % (raw, raw)
            )  # mostly no request
    lines = proxy.logged()
    limit = time.monotonic() + 60
    while (
        len([line for line in lines if line["event"] == "compaction.finished"]) < sent
        and time.monotonic() < limit
    ):
        time.sleep(0.05)
        lines += proxy.logged()
    counted = {
        name: len([line for line in lines if line["event"] == name])
        for name in {line["event"] for line in lines}
    }
    assert counted == {"compaction.started": sent, "compaction.finished": sent}
    assert {line["level"] for line in lines} == {"info"}
    assert any("forged" in line["model"] for line in lines if "model" in line)  # they did get there


def test_a_failing_summary_of_a_forged_model_is_one_line(proxy: Any) -> None:
    forged = FORGED[0]
    answers = iter(
        [b"HTTP/1.1 500 forged\r\ncontent-length: 40\r\n\r\n" + FORGED[0].encode().ljust(40)[:40]] * 1_000
    )
    proxy.recorder.answer = lambda _: next(answers)
    status, _, _ = proxy.post(
        "/v1/chat/completions", _body(forged, 900), b"x-compaction: force", b"x-session-id: failing"
    )
    assert status == 500  # the upstream's own
    lines = proxy.logged()
    assert lines
    assert all(line["event"].startswith(("compaction.", "relay.", "upstream.")) for line in lines), lines
