"""Build the site of docs/ into site/, and refuse one that has a broken link or loads anything from elsewhere.

    uv run --group docs python .ci/docs_site.py

zensical writes the pages. Added are: each page's Markdown beside it, the files of the repository that pages
link to (below site/source), and llms-full.txt. `python -m http.server -d site` serves it, search included.
"""

# ruff: noqa: INP001 - a script, not a package

import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from os.path import relpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
DOCS = ROOT / "docs"
# Links as Markdown and HTML write them.
LINK = re.compile(r"""(?P<before>\]\(|href="|src="|srcset=")(?P<target>[^)"#\s]+)""")
# What a browser loads by itself, by element and attribute; a link waits to be followed.
LOADED = {"script": "src", "img": "src", "source": "srcset", "iframe": "src", "object": "data"}
LOADING_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}
# Pictures of the dashboard are taken of a running proxy; a checkout may be without all of them.
PICTURES = DOCS / "images"
FOREIGN_CSS = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""")


def outside(page: Path, target: str) -> Path | None:
    """The file of the repository, outside of docs/, that a page links to."""
    file = (page.parent / target).resolve()
    local = "://" not in target and file.is_file()
    return file if local and file.is_relative_to(ROOT) and not file.is_relative_to(DOCS) else None


def moved(page: Path, found: re.Match[str]) -> str:
    """A link to such a file, which lies in source/ on the site."""
    file = outside(page, found["target"])
    if file is None:
        return found[0]
    place = relpath(DOCS / "source" / file.relative_to(ROOT), page.parent)
    copy = SITE / "source" / file.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
    return found["before"] + place


def publish(page: Path) -> str:
    """Put a page's Markdown beside its HTML, with links that hold there; its text."""
    place = SITE / page.relative_to(DOCS)
    html = place.with_suffix(".html")
    if page.name == "README.md":  # the first page of its folder
        html = place.with_name("index.html")
    follow = partial(moved, page)
    html.write_text(LINK.sub(follow, html.read_text("utf-8")), "utf-8")
    text = LINK.sub(follow, page.read_text("utf-8"))
    place.write_text(text, "utf-8")
    return text


class Seen(HTMLParser):
    """What a page links to, what it loads, and the places in it that may be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element."""
        named = {name: value or "" for name, value in attrs}
        self.places |= {named[key] for key in ("id", "name") if key in named}
        loads = named.get(LOADED.get(tag, ""), "")
        if tag == "link" and LOADING_LINKS & set(named.get("rel", "").split()):
            loads = named.get("href", "")
        self.loaded += [loads] if loads else []
        self.links += [named[key] for key in ("href", "src") if named.get(key)]


def wrong() -> list[str]:
    """What is wrong with the site: links that lead nowhere, things that come from elsewhere."""
    seen: dict[Path, Seen] = {}
    for html in SITE.rglob("*.html"):
        seen[html] = Seen()
        seen[html].feed(html.read_text("utf-8"))
    lines = [
        f"{html.relative_to(SITE)}: {problem}: {link}"
        for html, page in seen.items()
        if html.name != "404.html"
        for problem, links in (("broken", broken(html, seen)), ("from elsewhere", foreign(page)))
        for link in links
    ]
    styles = (css for css in SITE.rglob("*.css") if FOREIGN_CSS.search(css.read_text("utf-8")))
    return lines + [f"{css.relative_to(SITE)}: loads from elsewhere" for css in styles]


def foreign(page: Seen) -> list[str]:
    """What a page loads from another host."""
    return [link for link in page.loaded if urlsplit(link).netloc]


def broken(html: Path, seen: dict[Path, Seen]) -> list[str]:
    """A page's links within the site that lead nowhere."""
    found = []
    for link in seen[html].links:
        parts = urlsplit(link)
        target = (html.parent / unquote(parts.path)).resolve() if parts.path else html
        target = target / "index.html" if target.is_dir() else target
        if parts.scheme or parts.netloc or (not any(PICTURES.glob("*.png")) and "images/" in link):
            continue
        anchored = not parts.fragment or target not in seen or unquote(parts.fragment) in seen[target].places
        if not (target.is_file() and anchored):
            found.append(link)
    return found


def main() -> int:
    """Exit code 1 if there is anything wrong."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:  # noqa: S603 - our own words
        return 1
    generated = runpy.run_path(str(ROOT / ".ci" / "docs_pages.py"))
    listed = [DOCS / page.file for page in generated["pages"]()]
    texts = [publish(page) for page in listed]
    (SITE / "llms-full.txt").write_text("\n\n".join(texts), "utf-8")
    lines = wrong()
    print("\n".join(lines) or f"{len(texts)} pages in {SITE.relative_to(ROOT)}/")  # noqa: T201 - a script prints
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
