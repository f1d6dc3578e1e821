import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.config.config import (
    Config,
    build_policy,
    format_key_path,
    get_model_settings,
    iter_keys,
)
from compaction_proxy.config.loader import ConfigOverride, load_config
from compaction_proxy.config.sections import TriggerRow
from compaction_proxy.core.budget import Reserves
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.core.strategies import CHAINED, SummaryShape
from compaction_proxy.core.trigger import TriggerRule

HOME = {"HOME": "/tmp"}
P = "COMPACTION_PROXY__"


def problems(text: str, tmp_path: Path, environ: Mapping[str, str] = HOME) -> list[str]:
    """The lines that a file leads to, without its folder."""
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return refused(path, environ)


def refused(path: Path | None, environ: Mapping[str, str] = HOME) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ)
    folder = f"{path.parent}/" if path else ""
    return str(caught.value).replace(folder, "").split("\n") if folder else str(caught.value).split("\n")


def loaded(text: str, tmp_path: Path, environ: Mapping[str, str] = HOME) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, environ).config


def test_an_unknown_key_is_named_with_its_place_and_the_likely_one(tmp_path: Path) -> None:
    text = "server:\n  port: 1\n\ncompaction:\n  stratgy: chained\n"
    assert problems(text, tmp_path) == [
        "config.yaml:5:3: compaction.stratgy: unknown key, did you mean 'strategy'?"
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("COMPACTON__STRATEGY", "compacton.strategy: unknown key, did you mean 'compaction'?"),
        ("COMPACTION__TRIGGER_TOKENS", "compaction.trigger_tokens: unknown key, did you mean 'trigger'?"),
    ],
)
def test_what_is_likely_is_the_outermost_name_and_the_key_without_its_unit(
    name: str, line: str, tmp_path: Path
) -> None:
    assert problems("", tmp_path, {**HOME, P + name: "1"}) == [f"{P}{name}: {line}"]


@pytest.mark.parametrize(
    ("text", "role"), [("user", "user"), ("system", "system"), ("null", None), ("", None)]
)
def test_a_variable_may_name_one_of_the_values_of_a_key_that_may_be_null(
    text: str, role: str | None, tmp_path: Path
) -> None:
    config = loaded("", tmp_path, {**HOME, P + "COMPACTION__STAND_IN_ROLE": text})
    assert config.compaction.stand_in_role == role


def test_the_file_is_the_one_given_then_the_variable_s_then_the_one_here(tmp_path: Path) -> None:
    for name, port in (("given.yaml", 1), ("named.yaml", 2), ("config.yaml", 3)):
        (tmp_path / name).write_text(f"server: {{port: {port}}}")
    named = {**HOME, "COMPACTION_PROXY_CONFIG": "named.yaml"}
    expected = [(Path("given.yaml"), named, 1), (None, named, 2), (None, HOME, 3)]
    ports = [load_config(path, environ).config.server.port for path, environ, _ in expected]
    assert ports == [1, 2, 3]


def test_environment_overrides_the_file_and_options_override_both(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("server:\n  port: 1\n  host: ::1\nstore: {ttl: 1d}\n")
    environ = {**HOME, P + "SERVER__PORT": "2", P + "SERVER__HOST": "localhost"}
    found = load_config(None, environ, [ConfigOverride("--port", ("server", "port"), 3)])
    assert (found.config.server.port, found.config.server.host, found.config.store.ttl) == (
        3,
        "localhost",
        "1d",
    )
    shown = {place: origin for place, origin in found.origins.items() if origin != "default"}
    assert shown == {
        "server.port": "--port",
        "server.host": f"environment {P}SERVER__HOST",
        "store.ttl": "config.yaml:4",
    }
    assert set(found.origins) == {format_key_path(key.path) for key in iter_keys()}


def test_a_section_from_the_environment_changes_only_the_keys_it_names(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "compaction:\n  keep: {messages: 3}\n  max_block_s: 1\n  mode: shadow\n"
    )
    environ = {**HOME, P + "COMPACTION": '{"max_block_s": 2, "keep": {}}', P + "COMPACTION__MODE": "bypass"}
    found = load_config(None, environ)
    assert found.config.compaction.max_block_s == 2
    assert found.config.compaction.mode == "bypass"
    assert found.origins["compaction.max_block_s"] == f"environment {P}COMPACTION"
    assert found.origins["compaction.mode"] == f"environment {P}COMPACTION__MODE"
    assert found.origins["compaction.strategy"] == "default"


def test_a_base_url_for_clients_is_never_taken_for_the_upstream() -> None:
    found = load_config(None, {**HOME, "OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "sk-x"})
    assert found.config.upstream == Config().upstream


def test_variables_hold_json_for_lists_and_maps_and_null_for_null() -> None:
    environ = {
        **HOME,
        P + "SESSION__HEADERS": '["X-One", "two"]',
        P + "COMPACTION__TRIGGER": '[{"iterations": 8}]',
        P + "COMPACTION__STRATEGIES__CHAINED__TEMPERATURE": "0.5",
        P + "COMPACTION__STRATEGIES": '{"chained": {"temperature": 1, "percent": 70}}',
        P + "COMPACTION__MAX_BLOCK_S": "",
        P + "SUMMARY__MODEL": "null",
        P + "SERVER__WORKERS": "1",
        P + "SERVER__CLIENT_KEYS": "[]",
        P + "UPSTREAM__LOWER_MAX_TOKENS": "false",
        P + "COMPACTION__BACKGROUND": "false",
    }
    config = load_config(None, environ).config
    assert config.session.headers == ("x-one", "two")
    assert config.compaction.trigger == (TriggerRow(iterations=8),)
    strategies: Any = config.compaction.strategies
    chained = strategies.chained
    assert (chained.temperature, chained.percent, config.summary.model) == (0.5, 70, None)


def test_models_of_the_environment_come_before_those_of_the_file(tmp_path: Path) -> None:
    environ = {**HOME, P + "MODELS": '{"b*": {"window": 3}, "c": {}}'}
    config = loaded("models:\n  a*: {window: 1}\n  b*: {window: 2}\n", tmp_path, environ)
    assert [(glob, model.window) for glob, model in config.models.items()] == [
        ("b*", 3),
        ("c", None),
        ("a*", 1),
    ]
    assert refused(None, {**HOME, P + "MODELS__A__WINDOW": "1"}) == [
        f"{P}MODELS__A__WINDOW: models.a.window: set all models as one JSON object in {P}MODELS"
    ]


def test_a_secret_comes_from_a_file_without_one_trailing_newline(tmp_path: Path) -> None:
    environ = {**HOME, P + "SERVER__ADMIN_KEY_FILE": str(tmp_path / "key")}
    (tmp_path / "key").write_text("s3cret\n")
    assert load_config(None, environ).config.server.admin_key.get_secret_value() == "s3cret"
    (tmp_path / "key").write_text("s3cret\n\n")
    assert "server.admin_key: a key can contain only printable ASCII" in refused(None, environ)[0]


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_secret_s_file_does_not_mean_that_no_key_is_asked_for(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    name = f"{P}SERVER__ADMIN_KEY_FILE"
    assert refused(None, {**HOME, name: str(tmp_path / "key")}) == [
        f"{name}: server.admin_key_file: the file is empty"
    ]


def test_a_secret_s_file_that_is_too_long_is_refused_and_not_cut(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 65_537)
    name = f"{P}SERVER__ADMIN_KEY_FILE"
    assert refused(None, {**HOME, name: str(tmp_path / "key")}) == [
        f"{name}: server.admin_key_file: the file is larger than 65,536 bytes"
    ]
    (tmp_path / "key").write_text("k" * 65_536)
    assert len(load_config(None, {**HOME, name: str(tmp_path / "key")}).config.server.admin_key) == 65_536


def test_a_secret_s_file_is_refused_where_it_makes_no_sense(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret")
    environ = {
        **HOME,
        P + "SUMMARY__API_KEY_FILE": str(tmp_path),
        P + "SERVER__PORT_FILE": str(tmp_path / "key"),
        P + "SERVER__SECRET": "other",
        P + "SERVER__SECRET_FILE": str(tmp_path / "key"),
    }
    assert refused(None, environ) == [
        f"{P}SERVER__PORT_FILE: server.port_file: unknown key, did you mean 'port'?",
        f"{P}SERVER__SECRET_FILE: server.secret: {P}SERVER__SECRET is also set; set only one of them",
        f"{P}SUMMARY__API_KEY_FILE: summary.api_key_file: cannot read the file: Is a directory",
    ]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=4))
def test_no_problem_quotes_a_secret(secret: str) -> None:
    marked = f"Zq9{secret}"
    environ = {
        **HOME,
        P + "SERVER__CLIENT_KEYS": json.dumps([marked]),
        P + "UPSTREAM__API_KEY": marked,
        P + "UPSTREAM__BASE_URL": f"https://{marked}@host",
        P + "STORE__URL": f"redis://:{marked}@host",
        P + "SUMMARY__API_KEY": marked,
        P + "MODELS": json.dumps({"a": {"summary": {"api_key": [marked]}}}),
    }
    with pytest.raises(ConfigError) as caught:
        load_config(None, environ)
    assert "Zq9" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "place", "working"),
    [
        ("upstream: {stream_usage: inject}", "upstream.stream_usage", '"observe"'),
        ("observability: {trace_content: true}", "observability.trace_content", "false"),
    ],
)
def test_a_key_of_a_later_version_takes_its_neutral_value_only(
    text: str, place: str, working: str, tmp_path: Path
) -> None:
    (line,) = problems(text, tmp_path)
    assert line.partition(": ")[2] == f"{place}: this version supports only {working}"


@pytest.mark.parametrize(
    ("environ", "url", "expected"),
    [
        ({"HOME": "/tmp"}, "null", "sqlite:////tmp/.local/share/compaction-proxy/state.db"),
        (
            {"HOME": "/tmp", "XDG_DATA_HOME": "/var/tmp"},
            "null",
            "sqlite:////var/tmp/compaction-proxy/state.db",
        ),
        (
            {"HOME": "/tmp", "XDG_DATA_HOME": "relative"},
            "null",
            "sqlite:////tmp/.local/share/compaction-proxy/state.db",
        ),
        ({"HOME": "/home/x"}, "sqlite:///~/s.db", "sqlite:////home/x/s.db"),
        ({}, "sqlite:////srv/s.db", "sqlite:////srv/s.db"),
        ({}, "memory://", "memory://"),
        ({}, "rediss+sentinel://u:p@a,b/s?prefix=x:", "rediss+sentinel://u:p@a,b/s?prefix=x:"),
        ({"REDIS_URL": "valkey://h:1/2"}, "null", "valkey://h:1/2"),
        ({"REDIS_URL": "valkey://h:1/2"}, "memory://", "memory://"),
        ({"HOME": "/tmp", "REDIS_URL": ""}, "null", "sqlite:////tmp/.local/share/compaction-proxy/state.db"),
    ],
)
def test_the_store_s_place_is_absolute(
    environ: Mapping[str, str], url: str, expected: str, tmp_path: Path
) -> None:
    assert (
        loaded(f"store: {{url: {url!r}}}".replace("'null'", "null"), tmp_path, environ).store.url == expected
    )


def test_a_relative_store_lies_in_the_working_directory(tmp_path: Path) -> None:
    assert loaded("store: {url: 'sqlite:///s.db'}", tmp_path, {}).store.url == f"sqlite:///{tmp_path}/s.db"


def test_without_a_home_it_keeps_what_it_keeps_in_memory_and_says_so(tmp_path: Path) -> None:
    found = load_config(None, {"HOME": ""})
    assert found.config.store.url == "memory://"
    assert [line for line in found.warnings if line.startswith("store.url: memory://")]
    assert problems("store: {url: 'sqlite:///~/x'}", tmp_path, {}) == [
        "config.yaml:1:9: store.url: ~ needs the variable HOME, which is not set"
    ]


def test_clients_keys_are_taken_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text('["a", "b"]\n')
    environ = {**HOME, P + "SERVER__CLIENT_KEYS_FILE": str(tmp_path / "keys"), P + "UPSTREAM__API_KEY": "x"}
    keys = load_config(None, environ).config.server.client_keys
    assert [key.get_secret_value() for key in keys] == ["a", "b"]


def test_null_is_taken_from_a_variable_where_a_field_may_be_null() -> None:
    fields = P + "COMPACTION__STRATEGIES__ANCHORED__"
    found = load_config(None, {**HOME, fields + "TEMPERATURE": "null", fields + "MAX_BLOCK_S": ""})
    strategies: Any = found.config.compaction.strategies
    anchored = strategies.anchored
    assert (anchored.temperature, anchored.max_block_s) == (None, None)


def test_a_file_of_the_version_before_still_loads(tmp_path: Path) -> None:
    text = """
upstream: {lower_max_tokens: false}
compaction:
  strategy: chained
  trigger: null
  target_tokens: null
  background: null
  recount: usage
  keep: {messages: null, tail_tokens: null, user_tokens: null, tool_results: null}
  strategies:
    chained: {percent: 70, keep_messages: 8, system_reserve_tokens: 1, output_reserve_tokens: 2,
      safety_tokens: 3, summary_tokens: 400, summary_max_tokens: 500, temperature: 0.5, task_tokens: 600,
      tool_characters: 700, message_characters: 800}
summary: {input: transcript}
"""
    row = build_policy(get_model_settings(loaded(text, tmp_path), "any"))
    assert row == replace(
        CHAINED,
        trigger=(TriggerRule(percent=70),),
        reserves=Reserves(system=1, output=2, safety=3),
        keep=replace(CHAINED.keep, messages=8),
        least_messages=9,
        task_tokens=replace(CHAINED.task_tokens, tokens=600),
        summary=SummaryShape(
            prompt_name="chained",
            tokens=400,
            max_tokens=500,
            temperature=0.5,
            tool_characters=700,
            message_characters=800,
            sections=CHAINED.summary.sections if CHAINED.summary else (),
        ),
    )


def test_a_tail_that_nobody_has_changed_gives_way_to_a_small_target(tmp_path: Path) -> None:
    text = "compaction: {target_tokens: 9000, strategies: {anchored: {tail_tokens: 20000, tail_percent: 20}}}"
    assert loaded(text, tmp_path).compaction.target_tokens == 9_000


def test_the_first_glob_that_matches_a_model_wins_and_changes_only_what_it_names(tmp_path: Path) -> None:
    text = """
compaction: {max_block_s: 5, strategies: {chained: {percent: 70}}}
summary: {model: small}
models:
  gpt-4*: {window: 9, compaction: {mode: shadow, strategies: {chained: {keep_messages: 4}}}}
  gpt-*: {alternation: strict, reserve_output: 7, summary: {instructions: Be brief.}}
"""
    config = loaded(text, tmp_path)
    first, second, other = (get_model_settings(config, model) for model in ("gpt-4.1", "gpt-5", "claude"))
    strategies: Any = first.compaction.strategies
    chained = strategies.chained
    assert (first.window, first.compaction.mode, first.compaction.max_block_s) == (9, "shadow", 5)
    assert (chained.percent, chained.keep_messages, first.summary) == (70, 4, config.summary)
    assert (second.alternation, second.reserve_output, second.window) == ("strict", 7, None)
    assert (second.summary.model, second.summary.instructions) == ("small", "Be brief.")
    assert (other.compaction, other.summary, other.window) == (config.compaction, config.summary, None)
    assert get_model_settings(config, "gpt-4.1") is first


@given(st.text())
def test_every_model_name_has_settings(model: str) -> None:
    assert get_model_settings(Config(), model).window is None
