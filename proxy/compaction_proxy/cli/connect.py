"""Holds the command `connect`, which prints or writes the settings that point a client at the proxy."""

import itertools
import os
from collections.abc import Mapping
from difflib import get_close_matches, unified_diff
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from compaction_proxy.cli.admin_client import build_local_url, parse_base_url
from compaction_proxy.cli.exit import BAD_CONFIG, FAILED, ConfigOption, exit_with_error
from compaction_proxy.cli.output import (
    Column,
    escape_unprintable,
    format_table,
    get_terminal_width,
    print_lines,
)


class ClientGuide(NamedTuple):
    """Instructions that point a client at the proxy.

    Attributes:
        title: Name of the client as users know it.
        destination: Where the user puts the lines, such as the name of a file or `the environment`.
        lines: The settings for that place, with placeholders such as `<URL>`.
        remark: Further advice, with placeholders. It may be empty.
    """

    title: str
    destination: str
    lines: str
    remark: str = ""


# The output limit that is written into a client's settings is the smaller of this number of tokens and this
# share of the context window.
MAX_OUTPUT_TOKENS = 32_000
OUTPUT_SHARE = 0.25
DEFAULT_WINDOW_TOKENS = 128_000


class TokenLimits(NamedTuple):
    """Token limits of a model, which are written into a client's settings.

    They keep the client from shortening conversations itself before the proxy does.

    Attributes:
        window_tokens: Size of the context window, in tokens.
    """

    window_tokens: int = DEFAULT_WINDOW_TOKENS

    @property
    def output_tokens(self) -> int:
        """The largest output that the client asks for, in tokens."""
        return min(MAX_OUTPUT_TOKENS, int(self.window_tokens * OUTPUT_SHARE))


_SESSION_NOTE = (
    "x-session-id names the conversation; without it the messages themselves tell which one it is."
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
            "The second line lets it name the chat. In a container, this machine is host.docker.internal.",
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
            "It names its sessions by itself, and takes HTTP where WebSockets are refused. It does not read "
            "OPENAI_BASE_URL; for one command, pass -c 'openai_base_url=\"<URL>\"'.",
        ),
        "claude-code": ClientGuide(
            "Claude Code",
            "the environment",
            "ANTHROPIC_BASE_URL=<ROOT>",
            "Where the model's window is small, set CLAUDE_CODE_AUTO_COMPACT_WINDOW=<WINDOW> and "
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS=<OUTPUT>. It names its sessions by itself. Its requests go to "
            "Anthropic, unless upstream.base_url or upstream.wires.messages says otherwise.",
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
            "The second line keeps it from summarising its history by itself, which would be paid twice.",
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
            "Add apiKey, unless the proxy has one of its own. Beyond contextLength Continue drops messages "
            "by itself, and in the end all but one; the proxy makes them fit instead.",
        ),
        "opencode": ClientGuide(
            "OpenCode",
            "~/.config/opencode/opencode.json",
            '{\n  "provider": {\n    "compaction-proxy": {\n      "npm": "@ai-sdk/openai-compatible",\n'
            '      "name": "compaction-proxy",\n'
            '      "options": { "baseURL": "<URL>", "apiKey": "{env:OPENAI_API_KEY}" },\n'
            '      "models": { "<MODEL>": { "limit": { "context": <WINDOW>, "output": <OUTPUT> } } }\n'
            "    }\n  }\n}",
            "Choose the model as compaction-proxy/<MODEL>. It names its sessions by itself.",
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
            "From its container, this machine is host.docker.internal.",
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


def fill_placeholders(text: str, url: str, model: str, limits: TokenLimits | None = None) -> str:
    """Returns the text with its placeholders filled in.

    Args:
        text: Text with placeholders such as `<URL>`.
        url: Base URL of the proxy, with `/v1`.
        model: Name of the model.
        limits: The model's token limits. None uses the defaults.
    """
    token_limits = limits or TokenLimits()
    values = {
        "<MODEL>": model,
        "<ROOT>": url.removesuffix("/v1"),
        "<URL>": url,
        "<WINDOW>": str(token_limits.window_tokens),
        "<OUTPUT>": str(token_limits.output_tokens),
    }
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text


if TYPE_CHECKING:
    from collections.abc import Callable

    from compaction_proxy.cli.client_config import GetTokenLimits

DEFAULT_MODEL = "gpt-5.4"
BACKUP_SUFFIX = ".before-compaction-proxy"
# Largest file that is edited, in bytes. A larger file cannot be the configuration of a client.
MAX_FILE_BYTES = 1_048_576


def connect(
    tool: Annotated[str | None, typer.Argument(metavar="[TOOL]", help="A client; --list names them.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the clients that are known.")] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Change its configuration file, with a backup.")
    ] = False,
    file: Annotated[Path | None, typer.Option(help="That file, where it is elsewhere.")] = None,
    model: Annotated[str, typer.Option(help="Model to name where one is needed.")] = DEFAULT_MODEL,
    window: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="What the model takes; else as configured or known."),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Of the proxy.")] = None,
    config: ConfigOption = None,
) -> None:
    """Print how a client is pointed at the proxy, or do it."""
    if list_ or tool is None:
        _list_clients()
        return
    if tool not in CLIENTS:
        close = get_close_matches(tool, CLIENTS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "; `connect --list` names those that are known"
        exit_with_error(f"{escape_unprintable(tool)!r}: no such client{hint}", BAD_CONFIG)
    target = _resolve_base_url(url, config)
    limits_of = partial(_resolve_token_limits, window, config, url)
    if apply:
        _edit_client_file(tool, target, model, file, limits_of)
    else:
        client, limits = CLIENTS[tool], limits_of(model)
        print_lines([f"# {client.title}: {client.destination}"])
        print_lines(fill_placeholders(client.lines, target, model, limits).splitlines())
        if client.remark:
            print_lines([f"# {fill_placeholders(client.remark, target, model, limits)}"])


def _list_clients() -> None:
    from compaction_proxy.cli.client_config import CLIENT_FILES

    columns = (Column("tool"), Column("what it is"), Column("--apply"))
    rows = [
        (name, client.title, CLIENT_FILES[name].path if name in CLIENT_FILES else "-")
        for name, client in CLIENTS.items()
    ]
    print_lines(format_table(columns, rows, get_terminal_width()))


def _resolve_base_url(url: str | None, config: Path | None) -> str:
    """Returns the proxy's base URL with `/v1`, from the option or else from the configuration."""
    from compaction_proxy.config.loader import load_config

    if url is None:
        server = load_config(config, os.environ).config.server
        if server.unix_socket is not None:
            exit_with_error(
                "server.unix_socket is configured, which clients cannot use; give --url", BAD_CONFIG
            )
        url = build_local_url(server).removesuffix(server.base_path)
    if any(each in url for each in " \"'\\"):
        exit_with_error("--url: a base URL such as http://127.0.0.1:4141", BAD_CONFIG)
    return f"{parse_base_url(url)}/v1"


def _resolve_token_limits(
    window: int | None, config: Path | None, url: str | None, model: str
) -> "TokenLimits":
    """Returns a model's token limits, which follow from its context window.

    The context window comes from the option, else from the configuration, else from the shipped table of
    models. If `url` is given, the local configuration is not used, because the proxy at that URL has its own.
    """
    from compaction_proxy.config.config import get_model_settings
    from compaction_proxy.config.loader import load_config
    from compaction_proxy.providers.windows import get_known_window

    if window is None and url is None:
        window = get_model_settings(load_config(config, os.environ).config, model).window
    return TokenLimits(window or get_known_window(model))


def _edit_client_file(
    tool: str, url: str, model: str, file: Path | None, get_limits: "GetTokenLimits"
) -> None:
    """Edits the client's file: prints the difference, keeps a backup and replaces the file atomically."""
    from compaction_proxy.cli.client_config import CLIENT_FILES, ClientConfigError

    if tool not in CLIENT_FILES:
        exit_with_error(
            f"{tool}: no file that could be changed; without --apply the lines are printed", BAD_CONFIG
        )
    path = (file or Path(CLIENT_FILES[tool].path)).expanduser().resolve()
    try:
        before = _read_config_file(path).decode("utf-8") if path.exists() else ""
        new_text = _edit_text(before, lambda text: CLIENT_FILES[tool].edit(text, url, model, get_limits))
    except (ClientConfigError, UnicodeDecodeError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        exit_with_error(f"{path}: left alone: {why}", FAILED)
    except OSError as error:
        exit_with_error(f"{path}: cannot be read: {error.strerror}", FAILED)
    if new_text == before:
        print(f"{path}: is so already")
        return
    name = str(path)
    changes = unified_diff(before.splitlines(), new_text.splitlines(), name, name, n=1, lineterm="")
    print_lines(escape_unprintable(line) for line in changes)
    try:
        backup = _replace_file(path, new_text)
    except OSError as error:
        exit_with_error(f"{path}: cannot be written: {error.strerror}", FAILED)
    print(f"{path}: written{f'; as it was: {backup}' if backup else ''}")


def _read_config_file(path: Path) -> bytes:
    """Returns the content of a file.

    Raises:
        ClientConfigError: The file is too large to be a configuration, or it is not a regular file. Reading
            from a pipe, for example, might never end.
    """
    from compaction_proxy.cli.client_config import ClientConfigError

    if not path.is_file():
        raise ClientConfigError("it is no regular file")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ClientConfigError(f"it is larger than {MAX_FILE_BYTES:,} bytes")
    return content


def _edit_text(old_text: str, edit: "Callable[[str], str]") -> str:
    """Applies `edit` to a text and keeps the line endings of the text, even if they are CRLF."""
    if "\r\n" not in old_text:
        return edit(old_text)
    plain = old_text.replace("\r\n", "\n")
    edited = edit(plain)
    return old_text if edited == plain else edited.replace("\n", "\r\n")


def _replace_file(path: Path, text: str) -> Path | None:
    """Replaces a file atomically and returns the path of the backup, or None if there was no file."""
    import shutil
    import tempfile

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
