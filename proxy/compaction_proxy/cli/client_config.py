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

from compaction_proxy.cli.connect import TokenLimits
from compaction_proxy.config import yaml_file
from compaction_proxy.core.errors import ConfigError, ProxyError

NAME = "compaction-proxy"
# Beyond its context length Continue drops messages by itself, and in the end all but one.
CONTINUE_TOKENS = 1_000_000
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

# The limits of a model.
GetTokenLimits = Callable[[str], TokenLimits]
# From a file's text, the proxy's base URL with `/v1`, a model's name, and limits, to the new text.
EditText = Callable[[str, str, str, GetTokenLimits], str]


class ClientConfigError(ProxyError):
    """The file is left alone; the message says why."""


class ClientFile(NamedTuple):
    """A client's configuration file.

    Attributes:
        path: Where it is; starts with `~`.
        edit: Changes its text; an empty one where there is no file.
    """

    path: str
    edit: EditText


def _get_default_limits(_: str) -> TokenLimits:
    return TokenLimits()


def edit_codex(text: str, url: str, model: str, limits_of: GetTokenLimits = _get_default_limits) -> str:
    """Codex's TOML with a provider of ours, which is chosen; its model stays as it is.

    A window that stands there stays, too. Without one Codex takes a model that it does not know for larger.
    """
    provider = {"name": NAME, "base_url": url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    wanted = copy.deepcopy(_parse_toml(text))
    named = wanted.get("model")
    window = limits_of(named if isinstance(named, str) else model).window
    is_new = "model_context_window" not in wanted
    providers = wanted.setdefault("model_providers", {})
    if not isinstance(providers, dict):
        raise ClientConfigError("model_providers is no table")
    if providers.get(NAME) == provider and wanted.get("model_provider") == NAME and not is_new:
        return text
    if is_new:
        wanted["model_context_window"] = window
    providers[NAME] = provider
    wanted["model_provider"] = NAME
    made = _select_provider(_OUR_TABLE.sub("", text))
    made = f"model_context_window = {window}\n{made}" if is_new else made
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in provider.items())
    made = f"{made.rstrip()}\n\n[model_providers.{NAME}]\n{lines}"
    return _check_edit(made, _parse_toml, wanted)


def _select_provider(text: str) -> str:
    """The TOML with our provider chosen; that key must stand before the first table."""
    line = f'model_provider = "{NAME}"'
    table = _TABLE.search(text)
    stop = table.start() if table else len(text)
    above, below = text[:stop], text[stop:]
    if _PROVIDER.search(above):
        return _PROVIDER.sub(line, above, count=1) + below
    return f"{line}\n{above}{below}"


def edit_aider(text: str, url: str, model: str, limits_of: GetTokenLimits = _get_default_limits) -> str:
    """Aider's YAML with our base URL; its model stays as it is, and so does a limit of its history."""
    standing = _parse_yaml(text)
    named = standing.get("model")
    history = {"max-chat-history-tokens": limits_of(named if isinstance(named, str) else model).window}
    wanted = {**history, **standing, "openai-api-base": url}
    line = f"openai-api-base: {url}"
    made = _API_BASE.sub(line, text, count=1) if _API_BASE.search(text) else f"{_end_last_line(text)}{line}\n"
    if not history.keys() & standing.keys():
        made = _end_last_line(made) + "".join(f"{name}: {value}\n" for name, value in history.items())
    return _check_edit(made, _parse_yaml, wanted)


def edit_continue(text: str, url: str, model: str, limits_of: GetTokenLimits = _get_default_limits) -> str:
    """Continue's YAML with one model more, the first of the list."""
    limits = limits_of(model)
    item: dict[str, Any] = {"name": NAME, "provider": "openai", "model": model, "apiBase": url}
    item["defaultCompletionOptions"] = {"contextLength": CONTINUE_TOKENS, "maxTokens": limits.output_tokens}
    wanted = dict(_parse_yaml(text or _EMPTY_CONTINUE))
    models = wanted.get("models") or []
    if not isinstance(models, list):
        raise ClientConfigError("models is no list")
    named = [each for each in models if isinstance(each, dict) and each.get("name") == NAME]
    if any(each.get("apiBase") == url for each in named):
        return text
    if named:
        raise ClientConfigError(f"a model {NAME} stands there with another apiBase; change that line")
    wanted["models"] = [item, *models]
    text = text or _EMPTY_CONTINUE
    found = _MODELS.search(text)
    indent = found["indent"] if found else "  "
    values = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in item.items()}
    marks = ("- ", *["  "] * (len(values) - 1))
    pairs = zip(marks, values.items(), strict=True)
    lines = "".join(f"{indent}{mark}{key}: {value}\n" for mark, (key, value) in pairs)
    if found is None:
        return _check_edit(f"{_end_last_line(text)}models:\n{lines}", _parse_yaml, wanted)
    start = found.end() - len(indent)
    return _check_edit(text[:start] + lines + text[start:], _parse_yaml, wanted)


def edit_opencode(text: str, url: str, model: str, limits_of: GetTokenLimits = _get_default_limits) -> str:
    """OpenCode's JSON with a provider of ours. Without limits it asks for 32,000 tokens of output."""
    limits = limits_of(model)
    standing = _parse_json(text or '{"$schema": "https://opencode.ai/config.json"}')
    wanted = copy.deepcopy(standing)
    providers = wanted.setdefault("provider", {})
    if not isinstance(providers, dict):
        raise ClientConfigError("provider is no object")
    mine = providers.get(NAME)
    models = mine.get("models") if isinstance(mine, dict) else None
    providers[NAME] = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": {"baseURL": url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {model: {}, **(models if isinstance(models, dict) else {})},
    }
    ours = providers[NAME]["models"][model]
    if isinstance(ours, dict):
        ours.setdefault("limit", {"context": limits.window, "output": limits.output_tokens})
    return text if wanted == standing else json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"


FILES: Mapping[str, ClientFile] = MappingProxyType(
    {
        "codex": ClientFile("~/.codex/config.toml", edit_codex),
        "aider": ClientFile("~/.aider.conf.yml", edit_aider),
        "continue": ClientFile("~/.continue/config.yaml", edit_continue),
        "opencode": ClientFile("~/.config/opencode/opencode.json", edit_opencode),
    }
)


def _end_last_line(text: str) -> str:
    """The text with an end to its last line."""
    return text if not text or text.endswith("\n") else text + "\n"


def _check_edit(made: str, parse: Callable[[str], dict[str, Any]], wanted: Mapping[str, Any]) -> str:
    """The new text, if it says exactly what was meant."""
    try:
        same = parse(made) == wanted
    except ClientConfigError:
        same = False
    if not same:
        raise ClientConfigError(_UNUSUAL)
    return made


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ClientConfigError(f"it is no TOML: {error}") from None


def _parse_json(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise ClientConfigError("it is no plain JSON (comments are not understood)") from None
    if not isinstance(read, dict):
        raise ClientConfigError("it is no JSON object")
    return read


def _parse_yaml(text: str) -> dict[str, Any]:
    """What a YAML text says; read from a file, because that is how configurations are read."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "it"
        file.write_text(text, encoding="utf-8")
        try:
            found = yaml_file.read_yaml(file, os.environ)
        except ConfigError as error:
            raise ClientConfigError(str(error).replace(str(file), "it")) from None
    if found.problems:
        line, _, what = found.problems[0]
        raise ClientConfigError(f"line {line}: {what}")
    return found.values
