"""How popular clients are pointed at the proxy: what to write, and where. As of 2026-11.

`<URL>` stands for the proxy's base URL with `/v1`, `<ROOT>` for the same without, `<MODEL>` for a model,
`<WINDOW>` and `<OUTPUT>` for what it takes and what its answers may take of that, in tokens.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Client(NamedTuple):
    """A client.

    Attributes:
        title: What people call it.
        where: What the lines go into.
        lines: What to write there.
        note: What else there is to know; empty: nothing.
    """

    title: str
    where: str
    lines: str
    note: str = ""


# Clients ask for at most so much output, in tokens, and for at most this share of a window.
MAX_OUTPUT_TOKENS = 32_000
OUTPUT_SHARE = 0.25
DEFAULT_WINDOW_TOKENS = 128_000


class TokenLimits(NamedTuple):
    """What a client is told of a model, so that it does not compact before the proxy does.

    Attributes:
        window: Tokens that the model takes.
    """

    window: int = DEFAULT_WINDOW_TOKENS

    @property
    def output(self) -> int:
        """Most tokens that the client asks for."""
        return min(MAX_OUTPUT_TOKENS, int(self.window * OUTPUT_SHARE))


_SESSION_NOTE = (
    "x-session-id names the conversation; without it the messages themselves tell which one it is."
)

CLIENTS: Mapping[str, Client] = MappingProxyType(
    {
        "openai-python": Client(
            "OpenAI's library for Python",
            "Python, or OPENAI_BASE_URL in the environment",
            'from openai import OpenAI\n\nclient = OpenAI(\n    base_url="<URL>", '
            'default_headers={"x-session-id": "ticket-4711"}\n)',
            _SESSION_NOTE,
        ),
        "openai-node": Client(
            "OpenAI's library for JavaScript",
            "JavaScript or TypeScript, or OPENAI_BASE_URL in the environment",
            'import OpenAI from "openai";\n\nconst client = new OpenAI({\n  baseURL: "<URL>",\n'
            '  defaultHeaders: { "x-session-id": "ticket-4711" },\n});',
            _SESSION_NOTE,
        ),
        "langchain": Client(
            "LangChain",
            "Python",
            'from langchain_openai import ChatOpenAI\n\nmodel = ChatOpenAI(\n    model="<MODEL>", '
            'base_url="<URL>", default_headers={"x-session-id": "ticket-4711"}\n)',
            _SESSION_NOTE,
        ),
        "llamaindex": Client(
            "LlamaIndex",
            "Python, with the package llama-index-llms-openai-like",
            "from llama_index.llms.openai_like import OpenAILike\n\nllm = OpenAILike(\n"
            '    model="<MODEL>", api_base="<URL>", is_chat_model=True, is_function_calling_model=True,\n'
            '    default_headers={"x-session-id": "ticket-4711"},\n)',
            _SESSION_NOTE,
        ),
        "vercel-ai-sdk": Client(
            "Vercel AI SDK",
            "JavaScript or TypeScript, with the package @ai-sdk/openai-compatible",
            'import { createOpenAICompatible } from "@ai-sdk/openai-compatible";\n\n'
            'const provider = createOpenAICompatible({\n  name: "compaction-proxy",\n  baseURL: "<URL>",\n'
            '  apiKey: process.env.OPENAI_API_KEY,\n});\nconst model = provider.chatModel("<MODEL>");',
        ),
        "open-webui": Client(
            "Open WebUI",
            "the environment of its server",
            "OPENAI_API_BASE_URL=<URL>\nENABLE_FORWARD_USER_INFO_HEADERS=true",
            "The second line lets it name the chat. In a container, this machine is host.docker.internal.",
        ),
        "librechat": Client(
            "LibreChat",
            "librechat.yaml",
            "endpoints:\n  custom:\n    - name: compaction-proxy\n      apiKey: ${OPENAI_API_KEY}\n"
            "      baseURL: <URL>\n      models: {default: [<MODEL>], fetch: true}\n      headers:\n"
            '        X-Conversation-Id: "{{LIBRECHAT_BODY_CONVERSATIONID}}"',
        ),
        "codex": Client(
            "Codex CLI",
            "~/.codex/config.toml",
            'model_provider = "compaction-proxy"\nmodel_context_window = <WINDOW>\n\n'
            "[model_providers.compaction-proxy]\n"
            'name = "compaction-proxy"\nbase_url = "<URL>"\n'
            'env_key = "OPENAI_API_KEY"\nwire_api = "responses"',
            "It names its sessions by itself, and takes HTTP where WebSockets are refused. It does not read "
            "OPENAI_BASE_URL; for one command, pass -c 'openai_base_url=\"<URL>\"'.",
        ),
        "claude-code": Client(
            "Claude Code",
            "the environment",
            "ANTHROPIC_BASE_URL=<ROOT>",
            "Where the model's window is small, set CLAUDE_CODE_AUTO_COMPACT_WINDOW=<WINDOW> and "
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS=<OUTPUT>. It names its sessions by itself. Its requests go to "
            "Anthropic, unless upstream.base_url or upstream.wires.messages says otherwise.",
        ),
        "anthropic-python": Client(
            "Anthropic's library for Python",
            "Python, or ANTHROPIC_BASE_URL in the environment",
            'from anthropic import Anthropic\n\nclient = Anthropic(\n    base_url="<ROOT>", '
            'default_headers={"x-session-id": "ticket-4711"}\n)',
            _SESSION_NOTE,
        ),
        "aider": Client(
            "aider",
            "~/.aider.conf.yml",
            "openai-api-base: <URL>\nmax-chat-history-tokens: <WINDOW>",
            "The second line keeps it from summarising its history by itself, which would be paid twice.",
        ),
        "cline": Client(
            "Cline, Roo Code, Kilo Code",
            "the settings of the extension",
            "API Provider: OpenAI Compatible\nBase URL:     <URL>\nModel ID:     <MODEL>\n"
            "Context Window Size: <WINDOW>\nMax Output Tokens:   <OUTPUT>",
        ),
        "continue": Client(
            "Continue",
            "~/.continue/config.yaml",
            "models:\n  - name: compaction-proxy\n    provider: openai\n"
            "    model: <MODEL>\n    apiBase: <URL>\n"
            "    defaultCompletionOptions: {contextLength: 1000000, maxTokens: <OUTPUT>}",
            "Add apiKey, unless the proxy has one of its own. Beyond contextLength Continue drops messages "
            "by itself, and in the end all but one; the proxy makes them fit instead.",
        ),
        "opencode": Client(
            "OpenCode",
            "~/.config/opencode/opencode.json",
            '{\n  "provider": {\n    "compaction-proxy": {\n      "npm": "@ai-sdk/openai-compatible",\n'
            '      "name": "compaction-proxy",\n'
            '      "options": { "baseURL": "<URL>", "apiKey": "{env:OPENAI_API_KEY}" },\n'
            '      "models": { "<MODEL>": { "limit": { "context": <WINDOW>, "output": <OUTPUT> } } }\n'
            "    }\n  }\n}",
            "Choose the model as compaction-proxy/<MODEL>. It names its sessions by itself.",
        ),
        "litellm": Client(
            "LiteLLM",
            "its config.yaml",
            "model_list:\n  - model_name: <MODEL>\n    litellm_params:\n      model: openai/<MODEL>\n"
            "      api_base: <URL>\n      api_key: os.environ/OPENAI_API_KEY",
        ),
        "n8n": Client(
            "n8n",
            "Credentials, OpenAI",
            "Base URL: <URL>",
            "From its container, this machine is host.docker.internal.",
        ),
        "goose": Client(
            "goose",
            "the environment",
            "GOOSE_PROVIDER=openai\nOPENAI_HOST=<ROOT>\nGOOSE_CONTEXT_LIMIT=<WINDOW>",
        ),
        "curl": Client(
            "curl",
            "a shell",
            'curl <URL>/chat/completions -H "authorization: Bearer $OPENAI_API_KEY" \\\n'
            "  -H 'content-type: application/json' -H 'x-session-id: ticket-4711' \\\n"
            '  -d \'{"model": "<MODEL>", "messages": [{"role": "user", "content": "Hello"}]}\'',
            _SESSION_NOTE,
        ),
    }
)


def filled(text: str, url: str, model: str, limits: TokenLimits | None = None) -> str:
    """The text for a proxy at a base URL with `/v1`, and for a model's limits."""
    known = limits or TokenLimits()
    values = {
        "<MODEL>": model,
        "<ROOT>": url.removesuffix("/v1"),
        "<URL>": url,
        "<WINDOW>": str(known.window),
        "<OUTPUT>": str(known.output),
    }
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text
