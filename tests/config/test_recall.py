"""What of `recall` can be set, and what is refused."""

from pathlib import Path

import pytest

from compaction_proxy.config.config import get_model_settings
from compaction_proxy.config.loader import load_config
from compaction_proxy.config.sections import RecallSection
from compaction_proxy.core.errors import ConfigError

HOME = {"HOME": "/nowhere"}


def written(text: str, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_model_replaces_the_keys_of_recall_that_it_names(tmp_path: Path) -> None:
    text = "recall: {tool: inject, auto_tokens: 300}\nmodels: {local-*: {tools: true, recall: {tool: none}}}"
    config = load_config(written(text, tmp_path), HOME).config
    local, other = get_model_settings(config, "local-1"), get_model_settings(config, "gpt-5")
    assert (local.tools, local.recall) == (True, RecallSection(tool="none", auto_tokens=300))
    assert (other.tools, other.recall) == (None, RecallSection(tool="inject", auto_tokens=300))


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("recall: {tool: maybe}", "recall.tool", "Input should be 'none', 'inject' or 'always'"),
        ("recall: {auto: always}", "recall.auto", "Input should be 'none' or 'inject'"),
        ("recall: {max_hops: 0}", "recall.max_hops", "Input should be greater than or equal to 1"),
        ("recall: {max_hops: 17}", "recall.max_hops", "Input should be less than or equal to 16"),
        ("recall: {auto_tokens: 9000}", "recall.auto_tokens", "Input should be less than or equal to 2000"),
        ("recall: {auto_score: 1.5}", "recall.auto_score", "Input should be less than or equal to 1"),
        ("models: {a: {tools: auto}}", "models.a.tools", "Input should be a valid boolean"),
        ("recall: {max_hop: 3}", "recall.max_hop", "unknown key, did you mean 'max_hops'?"),
    ],
)
def test_what_makes_no_sense_is_refused_and_named(text: str, place: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(written(text, tmp_path), HOME)
    [line] = str(refused.value).splitlines()
    assert line.partition(": ")[2].partition(", unable")[0] == f"{place}: {what}"
