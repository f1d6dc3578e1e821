"""What reaches stderr. Run as a process, because logging belongs to the whole of one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import compaction_proxy
from compaction_proxy.telemetry.logs import CONTROL, escape_control_characters, scrub_event


def logged(code: str, style: str = "json") -> list[str]:
    """Lines on stderr of a program that has set logging up."""
    start = "import logging\nfrom compaction_proxy.support import log_events\n"
    start += "from compaction_proxy.telemetry import logs\n"
    start += f"logs.configure_logging({style!r})\nlog = logs.get_logger('compaction_proxy.x')\n"
    environ = {"PYTHONPATH": str(Path(compaction_proxy.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def events(code: str) -> list[dict[str, Any]]:
    """Events without their time."""
    found = [json.loads(line) for line in logged(code)]
    return [{key: value for key, value in event.items() if key != "timestamp"} for event in found]


def test_our_events_and_those_of_libraries_are_lines_of_one_form() -> None:
    code = """
log.info(log_events.COMPACTION_FINISHED, tokens_before=9)
logging.getLogger("asyncio").error("task %s lost", 7)
logging.getLogger("uvicorn.error").info("Started")
log.debug("hidden")
"""
    assert events(code) == [
        {"event": "compaction.finished", "level": "info", "logger": "compaction_proxy.x", "tokens_before": 9},
        {"event": "task 7 lost", "level": "error", "logger": "asyncio"},
    ]


def test_setting_up_twice_does_not_log_twice() -> None:
    assert len(logged("logs.configure_logging('json'); log.info('x')")) == 1


def test_no_credential_gets_into_a_line() -> None:
    code = """
log.info("call with Bearer Zq9abc", authorization="Zq9", api_key="Zq9",
         headers={"X-Api-Key": "Zq9", "a": ["sk-Zq9abcdef"]},
         url="https://user:Zq9@host/", other=b"basic Zq9==", error=ValueError("sk-proj-Zq9abc"))
try:
    raise ValueError("refused: Bearer Zq9")
except ValueError:
    log.exception("failed")
logging.getLogger("lib").error("key %s", "sk-Zq9abcdef")
"""
    lines = logged(code)
    assert len(lines) == 3
    assert "Zq9" not in "".join(lines)
    assert "[credential]" in lines[2]


def test_control_characters_do_not_reach_a_terminal() -> None:
    (line,) = logged(r"log.info('a\x1b[31m\nb', name='c\r\u2028d')", "console")
    assert "\x1b[31m" not in line
    assert r"a\x1b[31m\nb" in line
    assert r"c\r\u2028d" in line


@given(st.text())
def test_an_escaped_text_has_no_control_character(text: str) -> None:
    assert not CONTROL.search(escape_control_characters(None, "", {"event": text})["event"])


@pytest.mark.parametrize("text", ["tokens: 12", "task-1", "the basics", "https://host/path?a=b@c"])
def test_what_is_no_credential_stays(text: str) -> None:
    assert scrub_event(None, "", {"event": text, "tokens": 5}) == {"event": text, "tokens": 5}
