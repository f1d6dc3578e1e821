"""Configuration files of clients, changed so that they use the proxy: from text to text, nothing is written.

Only the lines that matter are touched. What comes out is parsed and compared with what was meant, so that an
unusual layout is refused rather than spoilt.
"""

import copy
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from proxy.config import document
from proxy.errors import ConfigError, ProxyError

NAME = "compaction-proxy"
_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)
_OUR_TABLE = re.compile(
    r"^\[model_providers\.(?:\"compaction-proxy\"|compaction-proxy)\][ \t]*\n(?:(?![ \t]*\[).*\n)*",
    re.MULTILINE,
)
_PROVIDER = re.compile(r"^model_provider[ \t]*=.*$", re.MULTILINE)
_API_BASE = re.compile(r"^openai-api-base[ \t]*:.*$", re.MULTILINE)
_MODELS = re.compile(r"^models:[ \t]*(?:#.*)?\n(?P<indent>[ \t]*)(?=- )", re.MULTILINE)
_EMPTY_CONTINUE = "name: Local\nversion: 1.0.0\nschema: v1\n"
_UNUSUAL = "its layout is unusual; write the lines yourself (they are printed without --apply)"

# From a file's text, the proxy's base URL with `/v1`, and a model's name, to the new text.
Edit = Callable[[str, str, str], str]


class Refused(ProxyError):  # noqa: N818 - it names what happened
    """The file is left alone; the message says why."""


class ClientFile(NamedTuple):
    """A client's configuration file.

    Attributes:
        path: Where it is; starts with `~`.
        edit: Changes its text; an empty one where there is no file.
    """

    path: str
    edit: Edit


def codex(text: str, url: str, model: str) -> str:  # noqa: ARG001 - its model stays as it is
    """Codex's TOML with a provider of ours, which is chosen."""
    provider = {"name": NAME, "base_url": url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    wanted = copy.deepcopy(_toml(text))
    providers = wanted.setdefault("model_providers", {})
    if not isinstance(providers, dict):
        raise Refused("model_providers is no table")
    if providers.get(NAME) == provider and wanted.get("model_provider") == NAME:
        return text
    providers[NAME] = provider
    wanted["model_provider"] = NAME
    made = _with_provider(_OUR_TABLE.sub("", text))
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in provider.items())
    made = f"{made.rstrip()}\n\n[model_providers.{NAME}]\n{lines}"
    return _checked(made, _toml, wanted)


def _with_provider(text: str) -> str:
    """The TOML with our provider chosen; that key must stand before the first table."""
    line = f'model_provider = "{NAME}"'
    table = _TABLE.search(text)
    stop = table.start() if table else len(text)
    above, below = text[:stop], text[stop:]
    if _PROVIDER.search(above):
        return _PROVIDER.sub(line, above, count=1) + below
    return f"{line}\n{above}{below}"


def aider(text: str, url: str, model: str) -> str:  # noqa: ARG001 - its model stays as it is
    """Aider's YAML with our base URL."""
    wanted = {**_yaml(text), "openai-api-base": url}
    line = f"openai-api-base: {url}"
    made = _API_BASE.sub(line, text, count=1) if _API_BASE.search(text) else f"{_ended(text)}{line}\n"
    return _checked(made, _yaml, wanted)


def continue_(text: str, url: str, model: str) -> str:
    """Continue's YAML with one model more, the first of the list."""
    item = {"name": NAME, "provider": "openai", "model": model, "apiBase": url}
    wanted = dict(_yaml(text or _EMPTY_CONTINUE))
    models = wanted.get("models") or []
    if not isinstance(models, list):
        raise Refused("models is no list")
    named = [each for each in models if isinstance(each, dict) and each.get("name") == NAME]
    if any(each.get("apiBase") == url for each in named):
        return text
    if named:
        raise Refused(f"a model {NAME} stands there with another apiBase; change that line")
    wanted["models"] = [item, *models]
    text = text or _EMPTY_CONTINUE
    found = _MODELS.search(text)
    indent = found["indent"] if found else "  "
    lines = "".join(
        f"{indent}{'- ' if at == 0 else '  '}{key}: {value}\n" for at, (key, value) in enumerate(item.items())
    )
    if found is None:
        return _checked(f"{_ended(text)}models:\n{lines}", _yaml, wanted)
    start = found.end() - len(indent)
    return _checked(text[:start] + lines + text[start:], _yaml, wanted)


def opencode(text: str, url: str, model: str) -> str:
    """OpenCode's JSON with a provider of ours."""
    standing = _json(text or '{"$schema": "https://opencode.ai/config.json"}')
    wanted = copy.deepcopy(standing)
    providers = wanted.setdefault("provider", {})
    if not isinstance(providers, dict):
        raise Refused("provider is no object")
    mine = providers.get(NAME)
    models = mine.get("models") if isinstance(mine, dict) else None
    providers[NAME] = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": {"baseURL": url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {model: {}, **(models if isinstance(models, dict) else {})},
    }
    return text if wanted == standing else json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"


FILES: Mapping[str, ClientFile] = MappingProxyType(
    {
        "codex": ClientFile("~/.codex/config.toml", codex),
        "aider": ClientFile("~/.aider.conf.yml", aider),
        "continue": ClientFile("~/.continue/config.yaml", continue_),
        "opencode": ClientFile("~/.config/opencode/opencode.json", opencode),
    }
)


def _ended(text: str) -> str:
    """The text with an end to its last line."""
    return text if not text or text.endswith("\n") else text + "\n"


def _checked(made: str, parse: Callable[[str], dict[str, Any]], wanted: Mapping[str, Any]) -> str:
    """The new text, if it says exactly what was meant."""
    try:
        same = parse(made) == wanted
    except Refused:
        same = False
    if not same:
        raise Refused(_UNUSUAL)
    return made


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise Refused(f"it is no TOML: {error}") from None


def _json(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise Refused("it is no plain JSON (comments are not understood)") from None
    if not isinstance(read, dict):
        raise Refused("it is no JSON object")
    return read


def _yaml(text: str) -> dict[str, Any]:
    """What a YAML text says; read from a file, because that is how configurations are read."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "it"
        file.write_text(text, encoding="utf-8")
        try:
            found = document.read(file, os.environ)
        except ConfigError as error:
            raise Refused(str(error).replace(str(file), "it")) from None
    if found.problems:
        line, _, what = found.problems[0]
        raise Refused(f"line {line}: {what}")
    return found.values
