"""Edits the text of clients' configuration files so that the clients use the proxy.

Each `edit_…` function takes the text of a file and returns the new text, or the same text if nothing has to
change. It writes no file. In TOML and YAML, only the relevant lines change. The new text is then parsed and
compared with the intended values. If they differ, because the file has an unusual layout, the function raises
`ClientConfigError` rather than damage the file. JSON is written anew as a whole.
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

PROVIDER_NAME = "compaction-proxy"
# The context length, in tokens, that is set in Continue. Continue drops messages from a longer conversation,
# in the end all but one. With so large a value it never does, and the proxy compacts the conversation
# instead.
CONTINUE_CONTEXT_TOKENS = 1_000_000
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

# A function that takes the name of a model and returns the model's token limits.
GetTokenLimits = Callable[[str], TokenLimits]
# A function that edits the text of a file. It takes the text, the proxy's base URL with `/v1`, the name of a
# model and a function that looks up token limits. It returns the new text.
EditText = Callable[[str, str, str, GetTokenLimits], str]


class ClientConfigError(ProxyError):
    """Reports that a client's configuration file is left unchanged. The message says why."""


class ClientFile(NamedTuple):
    """Describes a client's configuration file.

    Attributes:
        path: Path of the file, beginning with `~`.
        edit: Function that edits the text of the file. If there is no file, it gets an empty text.
    """

    path: str
    edit: EditText


def edit_codex(text: str, url: str, model: str, get_limits: GetTokenLimits) -> str:
    """Adds the proxy to Codex's TOML as a model provider and selects this provider.

    The configured model and an existing `model_context_window` do not change. If that key is missing, the
    function adds it. Otherwise, Codex would assume too large a context window for a model that it does not
    know.
    """
    provider = {"name": PROVIDER_NAME, "base_url": url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    expected = copy.deepcopy(_parse_toml(text))
    model_name = expected.get("model")
    window = get_limits(model_name if isinstance(model_name, str) else model).window_tokens
    is_new = "model_context_window" not in expected
    providers = expected.setdefault("model_providers", {})
    if not isinstance(providers, dict):
        raise ClientConfigError("model_providers is no table")
    if (
        providers.get(PROVIDER_NAME) == provider
        and expected.get("model_provider") == PROVIDER_NAME
        and not is_new
    ):
        return text
    if is_new:
        expected["model_context_window"] = window
    providers[PROVIDER_NAME] = provider
    expected["model_provider"] = PROVIDER_NAME
    new_text = _select_provider(_OUR_TABLE.sub("", text))
    new_text = f"model_context_window = {window}\n{new_text}" if is_new else new_text
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in provider.items())
    new_text = f"{new_text.rstrip()}\n\n[model_providers.{PROVIDER_NAME}]\n{lines}"
    return _check_edit(new_text, _parse_toml, expected)


def _select_provider(text: str) -> str:
    """Selects the proxy as the model provider in Codex's TOML.

    The key `model_provider` must come before the first table. After it, the key would belong to that table.
    """
    line = f'model_provider = "{PROVIDER_NAME}"'
    table = _TABLE.search(text)
    stop = table.start() if table else len(text)
    above, below = text[:stop], text[stop:]
    if _PROVIDER.search(above):
        return _PROVIDER.sub(line, above, count=1) + below
    return f"{line}\n{above}{below}"


def edit_aider(text: str, url: str, model: str, get_limits: GetTokenLimits) -> str:
    """Sets the proxy as the base URL in aider's YAML and adds a history limit if there is none.

    The limit is the model's context window. It keeps aider from summarising the history itself. The
    configured model and an existing limit do not change.
    """
    current = _parse_yaml(text)
    model_name = current.get("model")
    history = {
        "max-chat-history-tokens": get_limits(
            model_name if isinstance(model_name, str) else model
        ).window_tokens
    }
    expected = {**history, **current, "openai-api-base": url}
    line = f"openai-api-base: {url}"
    new_text = (
        _API_BASE.sub(line, text, count=1) if _API_BASE.search(text) else f"{_end_last_line(text)}{line}\n"
    )
    if not history.keys() & current.keys():
        new_text = _end_last_line(new_text) + "".join(f"{name}: {value}\n" for name, value in history.items())
    return _check_edit(new_text, _parse_yaml, expected)


def edit_continue(text: str, url: str, model: str, get_limits: GetTokenLimits) -> str:
    """Adds a model that uses the proxy to Continue's YAML, as the first model of the list.

    If the list has a model of the proxy's name with another URL, the function refuses to edit the file.
    """
    limits = get_limits(model)
    item: dict[str, Any] = {"name": PROVIDER_NAME, "provider": "openai", "model": model, "apiBase": url}
    item["defaultCompletionOptions"] = {
        "contextLength": CONTINUE_CONTEXT_TOKENS,
        "maxTokens": limits.output_tokens,
    }
    expected = dict(_parse_yaml(text or _EMPTY_CONTINUE))
    models = expected.get("models") or []
    if not isinstance(models, list):
        raise ClientConfigError("models is no list")
    own_models = [each for each in models if isinstance(each, dict) and each.get("name") == PROVIDER_NAME]
    if any(each.get("apiBase") == url for each in own_models):
        return text
    if own_models:
        raise ClientConfigError(
            f"a model {PROVIDER_NAME} stands there with another apiBase; change that line"
        )
    expected["models"] = [item, *models]
    text = text or _EMPTY_CONTINUE
    models_line = _MODELS.search(text)
    indent = models_line["indent"] if models_line else "  "
    values = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in item.items()}
    marks = ("- ", *["  "] * (len(values) - 1))
    pairs = zip(marks, values.items(), strict=True)
    lines = "".join(f"{indent}{mark}{key}: {value}\n" for mark, (key, value) in pairs)
    if models_line is None:
        return _check_edit(f"{_end_last_line(text)}models:\n{lines}", _parse_yaml, expected)
    start = models_line.end() - len(indent)
    return _check_edit(text[:start] + lines + text[start:], _parse_yaml, expected)


def edit_opencode(text: str, url: str, model: str, get_limits: GetTokenLimits) -> str:
    """Adds the proxy to OpenCode's JSON as a provider.

    The function also sets token limits for the model if it has none. Without limits, OpenCode asks for 32,000
    output tokens.
    """
    limits = get_limits(model)
    current = _parse_json(text or '{"$schema": "https://opencode.ai/config.json"}')
    expected = copy.deepcopy(current)
    providers = expected.setdefault("provider", {})
    if not isinstance(providers, dict):
        raise ClientConfigError("provider is no object")
    own_provider = providers.get(PROVIDER_NAME)
    models = own_provider.get("models") if isinstance(own_provider, dict) else None
    providers[PROVIDER_NAME] = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER_NAME,
        "options": {"baseURL": url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {model: {}, **(models if isinstance(models, dict) else {})},
    }
    model_entry = providers[PROVIDER_NAME]["models"][model]
    if isinstance(model_entry, dict):
        model_entry.setdefault("limit", {"context": limits.window_tokens, "output": limits.output_tokens})
    return text if expected == current else json.dumps(expected, indent=2, ensure_ascii=False) + "\n"


CLIENT_FILES: Mapping[str, ClientFile] = MappingProxyType(
    {
        "codex": ClientFile("~/.codex/config.toml", edit_codex),
        "aider": ClientFile("~/.aider.conf.yml", edit_aider),
        "continue": ClientFile("~/.continue/config.yaml", edit_continue),
        "opencode": ClientFile("~/.config/opencode/opencode.json", edit_opencode),
    }
)


def _end_last_line(text: str) -> str:
    """Returns the text with a line ending after its last line. An empty text stays empty."""
    return text if not text or text.endswith("\n") else text + "\n"


def _check_edit(new_text: str, parse: Callable[[str], dict[str, Any]], expected: Mapping[str, Any]) -> str:
    """Returns the new text if it parses to the expected values.

    Raises:
        ClientConfigError: The text does not parse, or it parses to other values.
    """
    try:
        is_same = parse(new_text) == expected
    except ClientConfigError:
        is_same = False
    if not is_same:
        raise ClientConfigError(_UNUSUAL)
    return new_text


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ClientConfigError(f"it is no TOML: {error}") from None


def _parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ClientConfigError("it is no plain JSON (comments are not understood)") from None
    if not isinstance(value, dict):
        raise ClientConfigError("it is no JSON object")
    return value


def _parse_yaml(text: str) -> dict[str, Any]:
    """Parses YAML text. The text goes through a temporary file because `yaml_file` reads files only."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "it"
        file.write_text(text, encoding="utf-8")
        try:
            loaded = yaml_file.read_yaml(file, os.environ)
        except ConfigError as error:
            raise ClientConfigError(str(error).replace(str(file), "it")) from None
    if loaded.problems:
        line, _, problem = loaded.problems[0]
        raise ClientConfigError(f"line {line}: {problem}")
    return loaded.values
