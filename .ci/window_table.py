"""Writes `data/windows.json` of the package from `litellm`, checked against `genai-prices`.

    uv run --with litellm --with genai-prices python .ci/window_table.py 2026-11-22

The date is the day that the tables were looked at. Where they disagree is said on stderr.
"""

# ruff: noqa: INP001 - a script, not a package

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution, version
from pathlib import Path
from statistics import median_low
from typing import Any

from genai_prices.data import providers

from compaction_proxy.providers.windows import FALLBACK_WINDOW, find_by_prefix, normalize_name

TARGET = Path(__file__).resolve().parents[1] / "proxy" / "compaction_proxy" / "data" / "windows.json"
# Who makes the models, by litellm's and by genai-prices' names: they know best.
MAKERS = (
    "openai", "anthropic", "gemini", "vertex_ai-language-models", "xai", "deepseek", "mistral",
    "codestral", "moonshot", "zai", "dashscope", "minimax", "cohere_chat", "amazon_nova", "meta_llama",
    "vertex_ai-anthropic_models",
)  # fmt: skip
OTHER_MAKERS = (
    "openai", "anthropic", "google", "mistral", "x-ai", "deepseek", "moonshotai", "zai", "minimax",
    "cohere", "meta",
)  # fmt: skip
# Who serves open models on ordinary terms, and families of such models.
HOSTS = (
    "groq", "cerebras", "together_ai", "deepinfra", "fireworks_ai", "novita", "nebius", "hyperbolic",
    "sambanova", "baseten", "wandb", "vercel_ai_gateway",
)  # fmt: skip
FAMILY = re.compile(
    r"llama-\d(?:\.\d)?(?:-scout|-maverick)?|gpt-oss|gemma-\d|qwen\d(?:\.\d)?(?:-coder|-next)?|qwq"
    r"|deepseek-[rv]\d(?:\.\d)?|kimi-k\d(?:\.\d)?|glm-\d(?:\.\d)?|minimax-m\d(?:\.\d)?|phi-4|mixtral"
)
# A name that so many hosts serve has a row of its own.
COMMON = 3
# Text is what we compact; these are about something else, or are long gone.
OTHER = re.compile(
    r"audio|realtime|tts|image|transcribe|embed|ocr|voxtral|lyria|robotics|live|rerank|moderation|guard|lora"
    r"|exp-|experimental|learnlm|search|deep-research|container|voyage|orpheus|safeguard|computer-use|davinci"
    r"|babbage|instruct-?v0|instant-1|claude-[12]|omni|omr|vision|-vl-|gemini-(?:gemma|pro|1)|gpt-4-32k|titan"
    r"|daybreak|cyber|rosalind|-law$|gemini-flash-1|gv2|codex-spark|labs-|aya|/|medlm|m2-her|vibe"
    r"|mistral-code|command-light|non-reasoning|turbo-20|plus-20|fp8|-fast$|0813$|highspeed|turbo-preview|muse-|zai-glm"
)
# OpenAI limits the input apart from the total from GPT-5 on; of some of these only the total is listed.
TOTALS = {400_000, 1_050_000}
# Below this a listed figure is a host's mistake, or of a model that nobody keeps a conversation with.
LEAST_WINDOW = 4_096
LEAST_HOSTED_WINDOW = 8_192
# Names in use that the tables list otherwise.
ALIASES = {
    "claude-opus-4": "claude-opus-4-0",
    "claude-sonnet-4": "claude-sonnet-4-0",
    "gpt-4-0125-preview": "gpt-4-turbo",
    "gpt-4-vision-preview": "gpt-4-turbo",
    "grok-4": "grok-4-0709",
}


def litellm_rows() -> Iterator[tuple[str, str, int]]:
    """Provider, plain name and window of each chat model that litellm lists."""
    path = distribution("litellm").locate_file("litellm/model_prices_and_context_window_backup.json")
    for name, row in json.loads(Path(str(path)).read_text("utf-8")).items():
        if row.get("mode") in {"chat", "responses"} and not OTHER.search(normalize_name(name)):
            window = _window(row)
            if window >= LEAST_WINDOW:
                yield row.get("litellm_provider", ""), normalize_name(name), window


def _window(row: Mapping[str, Any]) -> int:
    window, output = (row.get(f"max_{part}_tokens") or 0 for part in ("input", "output"))
    total = row.get("litellm_provider") == "openai" and window in TOTALS
    return int(window - output if total else window)


def genai_rows() -> Iterator[tuple[str, int]]:
    """Plain name and window of each model that genai-prices lists under its maker."""
    for provider in providers:
        if provider.id in OTHER_MAKERS:
            for model in provider.models:
                name = normalize_name(model.id)
                if model.context_window and not OTHER.search(name):
                    yield name, model.context_window


def gathered() -> dict[str, int]:
    """Window by plain name: the maker's smallest, else genai-prices', else the lower middle of the hosts'."""
    made: dict[str, int] = {}
    hosted: defaultdict[str, list[int]] = defaultdict(list)
    families: defaultdict[str, list[int]] = defaultdict(list)
    for provider, name, window in litellm_rows():
        family = FAMILY.match(name)
        if provider in MAKERS:
            made[name] = min(window, made.get(name, window))
        elif provider in HOSTS and family and window >= LEAST_HOSTED_WINDOW:
            hosted[name].append(window)
            families[family[0]].append(window)
    for name, window in genai_rows():
        listed = made.setdefault(name, window)
        if not 0.9 < listed / window < 1.1:
            sys.stderr.write(f"{name}: litellm {listed:,}, genai-prices {window:,}\n")
    common = {name: windows for name, windows in hosted.items() if len(windows) >= COMMON}
    known = {name: median_low(windows) for name, windows in (families | common).items()} | made
    return known | {name: known[listed] for name, listed in ALIASES.items()}


def shortest(windows: Mapping[str, int]) -> dict[str, int]:
    """The same table without names that a shorter one, or the fallback, speaks for."""
    kept: dict[str, int] = {}
    for name in sorted(windows):
        if (find_by_prefix(name, kept) or FALLBACK_WINDOW) != windows[name]:
            kept[name] = windows[name]
    return kept


def main() -> None:
    """Write the table."""
    source = f"PyPI litellm {version('litellm')} and genai-prices {version('genai-prices')} (both MIT)"
    table = {"as_of": sys.argv[1], "source": source, "windows": shortest(gathered())}
    TARGET.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
