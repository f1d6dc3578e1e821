"""The style check finds what it is for, and nothing in plain sentences."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = runpy.run_path(str(ROOT / ".ci" / "check_style.py"))
TEXTS = runpy.run_path(str(ROOT / "tools" / "user_texts.py"))

BAD = [
    "Use doctor to see what mends it.",
    "Told to end, the proxy drains for 120 s, and it was told to end before.",
    "Time of a request beside waiting for the upstream.",
    "Prefix of our own paths.",
    "The header stands in the response.",
    "The store is left alone for a while.",
    "Compaction never starts by itself.",
    "A failure is the client's trouble.",
    "Requests go on as they came.",
    "Keys of which clients must show one.",
    "Take a conversation's newest one back.",
    "It is no JSON.",
    "Share of what was removed.",
    "What we say about ourselves.",
    "Whose strategy is in use.",
    "A number of rounds is kept.",
    "From `--url`, else from the configuration.",
    "A; b; c.",
    " ".join(["This sentence is long"] * 9),
]
GOOD = [
    "The proxy compacts the conversation at 75 % of the context window.",
    "Round 3 removed 29 messages.",
    "Undo round 3, the latest compaction.",
    "A status of 429 stands for a rate limit.",
    "There is no conversation with this id.",
    "Run `what is wrong; beside; our` in a shell.",
    "What does the proxy do if the store is down?",
    "The upstream is OpenAI; the key comes from the client.",
]


@pytest.mark.parametrize("sentence", BAD)
def test_a_sentence_of_each_bad_pattern_is_found_with_advice(sentence: str) -> None:
    assert list(CHECK["find_advice"](sentence))


@pytest.mark.parametrize("sentence", GOOD)
def test_plain_sentences_pass(sentence: str) -> None:
    assert list(CHECK["find_advice"](sentence)) == []


def test_a_finding_names_file_line_words_and_advice() -> None:
    text = TEXTS["UserText"]("docs/page.md", 7, "A good sentence.\nThe key stands in the file.")
    assert list(CHECK["list_findings"]([text])) == [
        "docs/page.md:8: “stands” in “The key stands in the file.”: write is, appears, replaces"
    ]


def test_the_check_fails_for_a_file_with_a_finding_and_passes_for_one_without(tmp_path: Path) -> None:
    for name, text, code in (
        ("bad.md", "It mends the store.\n", 1),
        ("good.md", "It repairs the store.\n", 0),
    ):
        page = tmp_path / name
        page.write_text(text)
        ran = subprocess.run(
            [sys.executable, str(ROOT / ".ci" / "check_style.py"), str(page)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == code, ran.stdout


def test_texts_come_from_every_source_that_users_meet() -> None:
    texts = TEXTS["list_texts"]()
    places = {each.path for each in texts}
    sources = [
        "README.md", "config.yaml", "deploy/helm/compaction-proxy/README.md", "deploy/monitoring/alerts.yml",
        "deploy/monitoring/grafana/dashboards/compaction-proxy.json",
        *(
            f"proxy/compaction_proxy/{name}"
            for name in (
                "config/sections.py", "config/strategies.py", "cli/main.py", "cli/doctor.py", "admin/auth.py",
                "admin/api/schemas.py", "admin/api/conversations.py", "core/errors.py", "gateway/routes.py",
                "admin/templates/overview.html", "support/formatting.py",
            )
        ),
    ]  # fmt: skip
    assert [each for each in sources if each not in places] == []
    assert any(place.startswith("docs/") for place in places)
    assert not any(place.startswith("docs/adr") for place in places)
    found = {" ".join(each.text.split()) for each in texts}
    assert "Start the proxy. Press Ctrl+C to stop it." in found  # a command's docstring
    assert "Base URL of the proxy." in found  # an option's help
