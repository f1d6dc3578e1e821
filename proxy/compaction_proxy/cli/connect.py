"""Defines the command `connect`. It prints or writes settings that make a client send requests to the proxy.

Each `edit_…` function takes the text of a client's configuration file and returns the new text, or the same
text if nothing has to change. These functions write no files.

A function that edits JSON generates the whole text anew. A function that edits TOML or YAML changes only the
lines with the settings that `connect` sets. The function then parses the new text and checks that it has the
intended values. If the check fails because of an unusual layout, the function raises `ClientConfigError`, so
that the file is not damaged.
"""

import copy
import itertools
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches, unified_diff
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

from compaction_proxy.cli.admin_client import build_local_url, parse_base_url
from compaction_proxy.cli.console import (
    BAD_CONFIG,
    FAILED,
    Column,
    ConfigOption,
    JsonOption,
    exit_with_error,
    format_table,
    get_terminal_width,
    print_json,
    print_lines,
)
from compaction_proxy.core.errors import ConfigError, ProxyError
from compaction_proxy.support.formatting import escape_unprintable

# `connect` writes a limit of output tokens into the settings of clients. The limit, in tokens, is
# `MAX_OUTPUT_TOKENS` or the share `OUTPUT_SHARE` of the model's context window, whichever is smaller.
MAX_OUTPUT_TOKENS = 32_000
OUTPUT_SHARE = 0.25
DEFAULT_WINDOW_TOKENS = 128_000
DEFAULT_MODEL = "gpt-5.4"
BACKUP_SUFFIX = ".before-compaction-proxy"
# Maximum bytes of a file that `connect` edits. `connect` refuses to edit a larger file, because no client's
# configuration is so large.
MAX_FILE_BYTES = 1_048_576
PROVIDER_NAME = "compaction-proxy"
# The context length, in tokens, that `connect` sets in the client Continue. If a conversation is longer than
# the context length, Continue drops messages. With this large value, Continue drops no messages, and the
# proxy compacts the conversation instead.
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
_UNUSUAL = "the file has an unusual layout; add the lines yourself (run without --apply to print them)"

# A function that takes the name of a model and returns the model's context window, in tokens. `connect`
# writes the context window into the settings of clients, so that they do not shorten conversations before the
# proxy does.
GetWindow = Callable[[str], int]
# A function that edits the text of a file. It takes the text, the proxy's base URL with `/v1`, the name of a
# model and a function that looks up context windows. It returns the new text.
EditText = Callable[[str, str, str, GetWindow], str]


class ClientConfigError(ProxyError):
    """Reports why the configuration file of a client cannot be edited. The file is left unchanged."""


def edit_codex(text: str, url: str, model: str, get_window: GetWindow) -> str:
    """Adds the proxy to the TOML text of Codex's configuration as a model provider. Selects this provider.

    Keeps the configured model. Adds the key `model_context_window` if it is missing, because Codex would
    otherwise assume too large a context window for a model that it does not know. Never changes an existing
    value of this key.

    Raises:
        ClientConfigError: If the text is not valid TOML or has an unusual layout, or if `model_providers` is
            not a table.
    """
    provider = {"name": PROVIDER_NAME, "base_url": url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    expected = copy.deepcopy(_parse_toml(text))
    model_name = expected.get("model")
    window = get_window(model_name if isinstance(model_name, str) else model)
    is_new = "model_context_window" not in expected
    providers = expected.setdefault("model_providers", {})
    if not isinstance(providers, dict):
        raise ClientConfigError("model_providers is not a table")
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
    """Returns the TOML text of Codex's configuration with the proxy as the selected model provider.

    The key `model_provider` must come before the first table. Below the heading of a table, the key would
    belong to that table.
    """
    line = f'model_provider = "{PROVIDER_NAME}"'
    table = _TABLE.search(text)
    stop = table.start() if table else len(text)
    above, below = text[:stop], text[stop:]
    if _PROVIDER.search(above):
        return _PROVIDER.sub(line, above, count=1) + below
    return f"{line}\n{above}{below}"


def edit_aider(text: str, url: str, model: str, get_window: GetWindow) -> str:
    """Sets the proxy's base URL in the YAML text of aider's configuration.

    Adds a history limit if there is none: the model's context window, in tokens. aider summarises a history
    that exceeds the limit, and aider's default limit is much lower. The configured model and an existing
    limit do not change.

    Raises:
        ClientConfigError: If the text is not valid YAML or has an unusual layout.
    """
    current = _parse_yaml(text)
    model_name = current.get("model")
    history = {"max-chat-history-tokens": get_window(model_name if isinstance(model_name, str) else model)}
    expected = {**history, **current, "openai-api-base": url}
    line = f"openai-api-base: {url}"
    new_text = (
        _API_BASE.sub(line, text, count=1) if _API_BASE.search(text) else f"{_end_last_line(text)}{line}\n"
    )
    if not history.keys() & current.keys():
        new_text = _end_last_line(new_text) + "".join(f"{name}: {value}\n" for name, value in history.items())
    return _check_edit(new_text, _parse_yaml, expected)


def edit_continue(text: str, url: str, model: str, get_window: GetWindow) -> str:
    """Adds a model `compaction-proxy` to the YAML text of Continue's configuration, as the first model.

    Continue sends the requests of this model to the proxy. If there already is a model `compaction-proxy`
    with the proxy's URL, the text does not change.

    Raises:
        ClientConfigError: If there already is a model `compaction-proxy` with another URL, if `models` is not
            a list, or if the text is not valid YAML or has an unusual layout.
    """
    item: dict[str, Any] = {"name": PROVIDER_NAME, "provider": "openai", "model": model, "apiBase": url}
    item["defaultCompletionOptions"] = {
        "contextLength": CONTINUE_CONTEXT_TOKENS,
        "maxTokens": _compute_output_limit(get_window(model)),
    }
    expected = dict(_parse_yaml(text or _EMPTY_CONTINUE))
    models = expected.get("models") or []
    if not isinstance(models, list):
        raise ClientConfigError("models is not a list")
    own_models = [each for each in models if isinstance(each, dict) and each.get("name") == PROVIDER_NAME]
    if any(each.get("apiBase") == url for each in own_models):
        return text
    if own_models:
        raise ClientConfigError(
            f"a model {PROVIDER_NAME} is already configured with another apiBase; change that line"
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


def edit_opencode(text: str, url: str, model: str, get_window: GetWindow) -> str:
    """Adds the proxy to the JSON text of OpenCode's configuration as a provider.

    Adds the model to this provider if it is missing, and gives the model token limits if it has none. Without
    token limits, OpenCode would request up to 32,000 output tokens.

    Raises:
        ClientConfigError: If the text is not a JSON object, or if its value `provider` is not an object.
    """
    window = get_window(model)
    current = _parse_json(text or '{"$schema": "https://opencode.ai/config.json"}')
    expected = copy.deepcopy(current)
    providers = expected.setdefault("provider", {})
    if not isinstance(providers, dict):
        raise ClientConfigError("provider is not an object")
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
        model_entry.setdefault("limit", {"context": window, "output": _compute_output_limit(window)})
    return text if expected == current else json.dumps(expected, indent=2, ensure_ascii=False) + "\n"


def _end_last_line(text: str) -> str:
    """Adds a line ending to the last line of a text if it has none. An empty text stays empty."""
    return text if not text or text.endswith("\n") else text + "\n"


def _check_edit(new_text: str, parse: Callable[[str], dict[str, Any]], expected: Mapping[str, Any]) -> str:
    """Returns the new text if parsing it gives the expected values.

    Raises:
        ClientConfigError: If the text cannot be parsed, or if parsing it gives other values.
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
        raise ClientConfigError(f"the file is not valid TOML: {error}") from None


def _parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ClientConfigError("the file is not plain JSON (comments are not supported)") from None
    if not isinstance(value, dict):
        raise ClientConfigError("the file is not a JSON object")
    return value


def _parse_yaml(text: str) -> dict[str, Any]:
    from compaction_proxy.config import yaml_file

    try:
        loaded = yaml_file.parse_yaml(text, Path("it"), None)
    except ConfigError as error:
        raise ClientConfigError(str(error)) from None
    if loaded.problems:
        line, _, problem = loaded.problems[0]
        raise ClientConfigError(f"line {line}: {problem}")
    return loaded.values


class ClientGuide(NamedTuple):
    """Instructions for a user who wants a client to send its requests to the proxy.

    Attributes:
        title: Name of the client as users know it.
        destination: Where the user puts the lines, such as the name of a file or `the environment`.
        lines: The settings for that place, with placeholders such as `<URL>`.
        remark: Further advice, with placeholders; empty if there is none.
        edit: Function that edits the text of the client's configuration file, whose path is `destination`. If
            the file does not exist, the function gets an empty text. None if `connect --apply` cannot edit a
            file of this client.
    """

    title: str
    destination: str
    lines: str
    remark: str = ""
    edit: EditText | None = None


_SESSION_NOTE = (
    "x-session-id identifies the conversation. Without it, the proxy identifies it by its messages."
)

CLIENTS: Mapping[str, ClientGuide] = MappingProxyType(
    {
        "openai-python": ClientGuide(
            "OpenAI's library for Python",
            "Python, or OPENAI_BASE_URL in the environment",
            'from openai import OpenAI\n\nclient = OpenAI(\n    base_url="<URL>", '
            'default_headers={"x-session-id": "ticket-4711"}\n)',
            _SESSION_NOTE,
        ),
        "openai-node": ClientGuide(
            "OpenAI's library for JavaScript",
            "JavaScript or TypeScript, or OPENAI_BASE_URL in the environment",
            'import OpenAI from "openai";\n\nconst client = new OpenAI({\n  baseURL: "<URL>",\n'
            '  defaultHeaders: { "x-session-id": "ticket-4711" },\n});',
            _SESSION_NOTE,
        ),
        "langchain": ClientGuide(
            "LangChain",
            "Python",
            'from langchain_openai import ChatOpenAI\n\nmodel = ChatOpenAI(\n    model="<MODEL>", '
            'base_url="<URL>", default_headers={"x-session-id": "ticket-4711"}\n)',
            _SESSION_NOTE,
        ),
        "llamaindex": ClientGuide(
            "LlamaIndex",
            "Python, with the package llama-index-llms-openai-like",
            "from llama_index.llms.openai_like import OpenAILike\n\nllm = OpenAILike(\n"
            '    model="<MODEL>", api_base="<URL>", is_chat_model=True, is_function_calling_model=True,\n'
            '    default_headers={"x-session-id": "ticket-4711"},\n)',
            _SESSION_NOTE,
        ),
        "vercel-ai-sdk": ClientGuide(
            "Vercel AI SDK",
            "JavaScript or TypeScript, with the package @ai-sdk/openai-compatible",
            'import { createOpenAICompatible } from "@ai-sdk/openai-compatible";\n\n'
            'const provider = createOpenAICompatible({\n  name: "compaction-proxy",\n  baseURL: "<URL>",\n'
            '  apiKey: process.env.OPENAI_API_KEY,\n});\nconst model = provider.chatModel("<MODEL>");',
        ),
        "open-webui": ClientGuide(
            "Open WebUI",
            "the environment of its server",
            "OPENAI_API_BASE_URL=<URL>\nENABLE_FORWARD_USER_INFO_HEADERS=true",
            "With the second line it sends the id of each chat. In a container, use host.docker.internal for "
            "this machine.",
        ),
        "librechat": ClientGuide(
            "LibreChat",
            "librechat.yaml",
            "endpoints:\n  custom:\n    - name: compaction-proxy\n      apiKey: ${OPENAI_API_KEY}\n"
            "      baseURL: <URL>\n      models: {default: [<MODEL>], fetch: true}\n      headers:\n"
            '        X-Conversation-Id: "{{LIBRECHAT_BODY_CONVERSATIONID}}"',
        ),
        "codex": ClientGuide(
            "Codex CLI",
            "~/.codex/config.toml",
            'model_provider = "compaction-proxy"\nmodel_context_window = <WINDOW>\n\n'
            "[model_providers.compaction-proxy]\n"
            'name = "compaction-proxy"\nbase_url = "<URL>"\n'
            'env_key = "OPENAI_API_KEY"\nwire_api = "responses"',
            "It sends its own session ids, and uses HTTP if the proxy refuses WebSockets. It does not read "
            "OPENAI_BASE_URL; for one command, pass -c 'openai_base_url=\"<URL>\"'.",
            edit=edit_codex,
        ),
        "claude-code": ClientGuide(
            "Claude Code",
            "the environment",
            "ANTHROPIC_BASE_URL=<ROOT>",
            "For a model with a small context window, set CLAUDE_CODE_AUTO_COMPACT_WINDOW=<WINDOW> and "
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS=<OUTPUT>. It sends its own session ids. Its requests go to "
            "Anthropic, unless upstream.base_url or upstream.wires.messages is set.",
        ),
        "anthropic-python": ClientGuide(
            "Anthropic's library for Python",
            "Python, or ANTHROPIC_BASE_URL in the environment",
            'from anthropic import Anthropic\n\nclient = Anthropic(\n    base_url="<ROOT>", '
            'default_headers={"x-session-id": "ticket-4711"}\n)',
            _SESSION_NOTE,
        ),
        "aider": ClientGuide(
            "aider",
            "~/.aider.conf.yml",
            "openai-api-base: <URL>\nmax-chat-history-tokens: <WINDOW>",
            "The second line turns off its own summaries of the history, which you would pay for as well.",
            edit=edit_aider,
        ),
        "cline": ClientGuide(
            "Cline, Roo Code, Kilo Code",
            "the settings of the extension",
            "API Provider: OpenAI Compatible\nBase URL:     <URL>\nModel ID:     <MODEL>\n"
            "Context Window Size: <WINDOW>\nMax Output Tokens:   <OUTPUT>",
        ),
        "continue": ClientGuide(
            "Continue",
            "~/.continue/config.yaml",
            "models:\n  - name: compaction-proxy\n    provider: openai\n"
            "    model: <MODEL>\n    apiBase: <URL>\n"
            "    defaultCompletionOptions: {contextLength: 1000000, maxTokens: <OUTPUT>}",
            "Add apiKey, unless the proxy has its own. Beyond contextLength, Continue drops messages. With "
            "this large value, the proxy compacts them instead.",
            edit=edit_continue,
        ),
        "opencode": ClientGuide(
            "OpenCode",
            "~/.config/opencode/opencode.json",
            '{\n  "provider": {\n    "compaction-proxy": {\n      "npm": "@ai-sdk/openai-compatible",\n'
            '      "name": "compaction-proxy",\n'
            '      "options": { "baseURL": "<URL>", "apiKey": "{env:OPENAI_API_KEY}" },\n'
            '      "models": { "<MODEL>": { "limit": { "context": <WINDOW>, "output": <OUTPUT> } } }\n'
            "    }\n  }\n}",
            "Choose the model as compaction-proxy/<MODEL>. It sends its own session ids.",
            edit=edit_opencode,
        ),
        "litellm": ClientGuide(
            "LiteLLM",
            "its config.yaml",
            "model_list:\n  - model_name: <MODEL>\n    litellm_params:\n      model: openai/<MODEL>\n"
            "      api_base: <URL>\n      api_key: os.environ/OPENAI_API_KEY",
        ),
        "n8n": ClientGuide(
            "n8n",
            "Credentials, OpenAI",
            "Base URL: <URL>",
            "In its container, use host.docker.internal for this machine.",
        ),
        "goose": ClientGuide(
            "goose",
            "the environment",
            "GOOSE_PROVIDER=openai\nOPENAI_HOST=<ROOT>\nGOOSE_CONTEXT_LIMIT=<WINDOW>",
        ),
        "curl": ClientGuide(
            "curl",
            "a shell",
            'curl <URL>/chat/completions -H "authorization: Bearer $OPENAI_API_KEY" \\\n'
            "  -H 'content-type: application/json' -H 'x-session-id: ticket-4711' \\\n"
            '  -d \'{"model": "<MODEL>", "messages": [{"role": "user", "content": "Hello"}]}\'',
            _SESSION_NOTE,
        ),
    }
)


def _compute_output_limit(window_tokens: int) -> int:
    return min(MAX_OUTPUT_TOKENS, int(window_tokens * OUTPUT_SHARE))


def fill_placeholders(text: str, url: str, model: str, window_tokens: int = DEFAULT_WINDOW_TOKENS) -> str:
    """Replaces the placeholders in a text by their values.

    Args:
        text: Text with placeholders such as `<URL>`.
        url: Base URL of the proxy, with `/v1`.
        model: Name of the model.
        window_tokens: The model's context window, in tokens.
    """
    values = {
        "<MODEL>": model,
        "<ROOT>": url.removesuffix("/v1"),
        "<URL>": url,
        "<WINDOW>": str(window_tokens),
        "<OUTPUT>": str(_compute_output_limit(window_tokens)),
    }
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text


def connect(  # noqa: PLR0913, PLR0917 - one parameter for each option
    tool: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOOL]",
            help="Name of a client. --list prints all names.",
            autocompletion=lambda: CLIENTS,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the names of the supported clients.")] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Change the client's configuration file, after a backup.")
    ] = False,
    file: Annotated[Path | None, typer.Option(help="Path to the configuration file of the client.")] = None,
    model: Annotated[str, typer.Option(help="Model to use, if the client needs one.")] = DEFAULT_MODEL,
    window: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Context window in tokens. Default: the configured or known window."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Base URL of the proxy.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the settings that point a client at the proxy, or write them to the client's file."""
    if as_json and apply:
        exit_with_error("--apply and --json: choose one of them", BAD_CONFIG)
    if list_ or tool is None:
        if as_json:
            print_json({"clients": [_describe_client(name) for name in CLIENTS]})
            return
        columns = (Column("tool"), Column("client"), Column("--apply"))
        rows = [
            (name, client.title, client.destination if client.edit else "-")
            for name, client in CLIENTS.items()
        ]
        print_lines(format_table(columns, rows, get_terminal_width()))
        return
    if tool not in CLIENTS:
        close = get_close_matches(tool, CLIENTS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "; `connect --list` prints the supported clients"
        exit_with_error(f"{escape_unprintable(tool)!r}: unknown client{hint}", BAD_CONFIG)
    target = _resolve_base_url(url, config)
    get_window = partial(_resolve_window, window, config, url)
    if apply:
        _edit_client_file(tool, target, model, file, get_window)
    else:
        client, window_tokens = CLIENTS[tool], get_window(model)
        lines = fill_placeholders(client.lines, target, model, window_tokens)
        remark = fill_placeholders(client.remark, target, model, window_tokens)
        if as_json:
            print_json({**_describe_client(tool), "lines": lines, "remark": remark or None})
            return
        print_lines([f"# {client.title}: {client.destination}", *lines.splitlines()])
        if remark:
            print_lines([f"# {remark}"])


def _describe_client(name: str) -> dict[str, Any]:
    """Returns what a client is called, where its settings go, and whether `--apply` can write them."""
    client = CLIENTS[name]
    return {
        "tool": name,
        "title": client.title,
        "destination": client.destination,
        "can_apply": client.edit is not None,
    }


def _resolve_base_url(url: str | None, config: Path | None) -> str:
    """Returns the proxy's base URL with `/v1`, from the option `--url` or else from the configuration.

    Ends the command with an error if the URL cannot be used.
    """
    from compaction_proxy.config.loader import load_config

    if url is None:
        server = load_config(config, os.environ).config.server
        if server.unix_socket is not None:
            exit_with_error("clients cannot use the configured server.unix_socket; set --url", BAD_CONFIG)
        url = build_local_url(server).removesuffix(server.base_path)
    if any(each in url for each in " \"'\\"):
        exit_with_error("--url: not a base URL such as http://127.0.0.1:4141", BAD_CONFIG)
    return f"{parse_base_url(url)}/v1"


def _resolve_window(window: int | None, config: Path | None, url: str | None, model: str) -> int:
    """Returns a model's context window in tokens.

    The context window is that of the option `--window`, else that of the configuration, else that of the
    shipped table of models, else a default. If `url` is given, the function does not use the configuration on
    this machine, because the proxy at that URL has its own configuration.
    """
    from compaction_proxy.config.config import get_model_settings
    from compaction_proxy.config.loader import load_config
    from compaction_proxy.providers.windows import get_known_window

    if window is None and url is None:
        window = get_model_settings(load_config(config, os.environ).config, model).window
    return window or get_known_window(model)


def _edit_client_file(tool: str, url: str, model: str, file: Path | None, get_window: GetWindow) -> None:
    """Edits the configuration file of a client, and prints which lines of the file change.

    If the text changes, keeps a backup of the old file and replaces the file atomically. Ends the command
    with an error if the file cannot be edited.
    """
    edit = CLIENTS[tool].edit
    if edit is None:
        exit_with_error(
            f"{tool}: connect cannot change a file of this client; run without --apply to print the settings",
            BAD_CONFIG,
        )
    path = (file or Path(CLIENTS[tool].destination)).expanduser().resolve()
    try:
        before = _read_config_file(path).decode("utf-8") if path.exists() else ""
        new_text = _edit_text(before, lambda text: edit(text, url, model, get_window))
    except (ClientConfigError, UnicodeDecodeError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        exit_with_error(f"{path}: not changed: {why}", FAILED)
    except OSError as error:
        exit_with_error(f"{path}: cannot read the file: {error.strerror}", FAILED)
    if new_text == before:
        print(f"{path}: already up to date")
        return
    name = str(path)
    changes = unified_diff(before.splitlines(), new_text.splitlines(), name, name, n=1, lineterm="")
    print_lines(escape_unprintable(line) for line in changes)
    try:
        backup = _replace_file(path, new_text)
    except OSError as error:
        exit_with_error(f"{path}: cannot write the file: {error.strerror}", FAILED)
    print(f"{path}: updated{f'; backup: {backup}' if backup else ''}")


def _read_config_file(path: Path) -> bytes:
    """Returns the content of a file.

    Raises:
        ClientConfigError: If the file is too large to be a configuration, or if it is not a regular file.
            Reading from a pipe, for example, might never end.
    """
    if not path.is_file():
        raise ClientConfigError("it is not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ClientConfigError(f"the file is larger than {MAX_FILE_BYTES:,} bytes")
    return content


def _edit_text(old_text: str, edit: Callable[[str], str]) -> str:
    """Applies `edit` to a text and returns the new text. `edit` always gets a text with LF line endings.

    If `old_text` has CRLF line endings, the new text has CRLF line endings, too.
    """
    if "\r\n" not in old_text:
        return edit(old_text)
    plain = old_text.replace("\r\n", "\n")
    edited = edit(plain)
    return old_text if edited == plain else edited.replace("\n", "\r\n")


def _replace_file(path: Path, text: str) -> Path | None:
    """Replaces the content of a file by `text`, atomically.

    Returns the path of the old file's backup, or None if there was no file.
    """
    import shutil

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        backup = None
        if path.exists():
            names = (f"{path.name}{BACKUP_SUFFIX}{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
            backup = next(each for each in map(path.with_name, names) if not each.exists())
            shutil.copymode(path, name)
            shutil.copy2(path, backup)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    return backup
