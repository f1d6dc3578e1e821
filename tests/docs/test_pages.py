"""The pages hang together, and a site that is broken or loads anything from elsewhere is refused."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from compaction_proxy.cli.connect import CLIENTS
from compaction_proxy.config.config import RESTART_KEYS
from tests.docs.blocks import ROOT
from tests.helpers.pages import chapter, page

SCRIPTS = ROOT / ".ci"
# The kinds of pages: https://diataxis.fr, and pages for contributors.
KINDS = ("Tutorials", "How-to guides", "Reference", "Explanation", "Contributing")


def script(name: str) -> Any:
    """The names of a script in .ci, of which none has run."""
    return runpy.run_path(str(SCRIPTS / name))


def test_pages_links_and_lists_are_whole() -> None:
    assert list(script("check_docs.py")["problems"]()) == []


def test_every_client_and_every_key_that_waits_is_on_a_page() -> None:
    clients, upgrade = page("clients.md"), page("upgrade.md")

    assert [name for name in CLIENTS if f"\n\n`{name}`. Into " not in clients] == []
    assert [name for name in RESTART_KEYS if f"`{name}`" not in upgrade] == []


def test_pages_are_grouped_by_kind() -> None:
    chapters = {page.chapter for page in script("docs_pages.py")["pages"]()}

    assert chapters == {"", *KINDS, "Decisions"}


def test_the_first_page_links_every_page_but_decisions() -> None:
    text = page("index.md")
    files = [each.file for each in script("docs_pages.py")["pages"]() if each.chapter in KINDS]

    assert [file for file in files if f"({file})" not in text] == []


def test_every_alert_has_a_runbook_and_no_other_has_one() -> None:
    [group] = yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yml").read_text("utf-8"))["groups"]
    alerts = [rule["alert"] for rule in group["rules"]]
    text = page("runbooks.md")

    assert re.findall(r"^## (Compaction\w+)$", text, re.MULTILINE) == alerts
    parts = ["**Meaning.**", "**Effect.**", "**Check.**", "**Fix.**"]
    assert [
        alert for alert in alerts if any(part not in chapter(text, f"## {alert}\n") for part in parts)
    ] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "# A\n\n| a |\n\n**Bold** words, [linked](b.md): and more. Next.\n",
            "Bold words, linked: and more.",
        ),
        ("# A\n\n```sh\nls\n```\n\nIs it?\n", "Is it?"),
        ("# 0001\n\n**Decision.** It is so. Because.\n", "It is so."),
    ],
)
def test_a_page_is_listed_with_its_first_sentence(text: str, said: str) -> None:
    assert script("docs_pages.py")["opening"](text) == said


def test_files_that_pages_link_to_are_published_with_them(tmp_path: Path) -> None:
    site = script("docs_site.py")
    site["moved"].__globals__["SITE"] = tmp_path
    page = ROOT / "docs" / "adr" / "README.md"
    text = "[a](../../Dockerfile) [b](../../deploy/caddy/Caddyfile#x) [c](../why.md) [d](https://d.example)"

    assert site["LINK"].sub(lambda found: site["moved"](page, found), text) == (
        "[a](../source/Dockerfile) [b](../source/deploy/caddy/Caddyfile#x) [c](../why.md) [d](https://d.example)"
    )
    assert (tmp_path / "source" / "Dockerfile").read_bytes() == (ROOT / "Dockerfile").read_bytes()
    assert (tmp_path / "source" / "deploy" / "caddy" / "Caddyfile").is_file()


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="b.html#there">b</a><a href="https://elsewhere.example">e</a><img src="p.png">', []),
        ('<a href="c.html">c</a>', ["a.html: broken: c.html"]),
        ('<a href="b.html#nowhere">b</a>', ["a.html: broken: b.html#nowhere"]),
        ('<img src="q.png">', ["a.html: broken: q.png"]),
        ('<script src="//cdn.example/x.js"></script>', ["a.html: from elsewhere: //cdn.example/x.js"]),
        (
            '<link rel="stylesheet" href="https://fonts.example/f.css">',
            ["a.html: from elsewhere: https://fonts.example/f.css"],
        ),
        ('<link rel="canonical" href="https://elsewhere.example/a.html">', []),
    ],
)
def test_a_site_that_is_broken_or_loads_from_elsewhere_is_refused(
    tmp_path: Path, html: str, problem: list[str]
) -> None:
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<p id="there">b</p>')
    (tmp_path / "p.png").write_bytes(b"")
    site = script("docs_site.py")
    site["wrong"].__globals__["SITE"] = tmp_path

    assert site["wrong"]() == problem


def test_a_style_that_loads_from_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("a { background: url('data:,'), url(b.png) }")
    (tmp_path / "b.css").write_text('@import "https://fonts.example/f.css";')
    site = script("docs_site.py")
    site["wrong"].__globals__["SITE"] = tmp_path

    assert site["wrong"]() == ["b.css: loads from elsewhere"]
