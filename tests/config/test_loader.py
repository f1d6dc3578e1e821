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
    to_plain_value,
)
from compaction_proxy.config.loader import ConfigOverride, load_config
from compaction_proxy.config.sections import TriggerRow
from compaction_proxy.config.types import parse_duration
from compaction_proxy.config.validation import UPSTREAM_KEY_MISSING
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


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


def test_all_problems_come_at_once_one_line_each(tmp_path: Path) -> None:
    text = "servr: {}\nstore: {ttl: 3 days}\nupstream: {base_url: 'ftp://x'}\n"
    environ = {**HOME, P + "SERVER__PORT": "70000", P + "SERVER__PRT": "1", P + "MODELS": "{"}
    assert problems(text, tmp_path, environ) == [
        f"{P}MODELS: models: not JSON at character 2: Expecting property name enclosed in double quotes",
        f"{P}SERVER__PRT: server.prt: unknown key, did you mean 'port'?",
        f"{P}SERVER__PORT: server.port: Input should be less than or equal to 65535",
        "config.yaml:3:12: upstream.base_url: a URL starts with http:// or https:// and names a host",
        "config.yaml:2:9: store.ttl: a duration is a whole number and a unit: 90s, 15m, 12h or 30d",
        "config.yaml:1:1: servr: unknown key, did you mean 'server'?",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("server:\n\tport: 1\n", "config.yaml:2:1: not YAML: a tab; YAML indents with spaces"),
        ("- a\n", "config.yaml:1:1: the file holds a mapping of sections, such as `server:`"),
        ("just text", "config.yaml:1:1: the file holds a mapping of sections, such as `server:`"),
        ("server:\n  port: 1\n  port: 2\n", "config.yaml:3:3: port: stands here twice"),
        ("server: {[1]: 2}\n", "config.yaml:1:10: a key is plain text"),
        ("server: {port: !!int x}\n", "config.yaml:1:16: not a valid int"),
        ("store: !x y", "config.yaml:1:8: not YAML: could not determine a constructor for the tag '!x'"),
        ("a: 1\n---\nb: 1\n", "config.yaml:2:1: not YAML: but found another document"),
        ("server: {host: *nobody}\n", "config.yaml:1:16: not YAML: found undefined alias 'nobody'"),
        (
            'server: {host: "${NO}"}\n',
            "config.yaml:1:16: ${NO} is not set; ${NO:-default} would give it a default",
        ),
        ("x: \x01\n", "config.yaml: not YAML: a character that is not allowed"),
    ],
)
def test_a_file_that_cannot_be_understood_leads_to_one_clear_line(
    text: str, line: str, tmp_path: Path
) -> None:
    assert problems(text, tmp_path)[0] == line


def test_a_file_that_cannot_be_read_leads_to_one_clear_line(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent.yaml") == ["absent.yaml: cannot be read: No such file or directory"]
    (tmp_path / "latin.yaml").write_bytes(b"server: {}\n# caf\xe9\n")
    assert refused(tmp_path / "latin.yaml") == ["latin.yaml:2: not UTF-8"]
    (tmp_path / "huge.yaml").write_bytes(b"#" * 300_000)
    assert refused(tmp_path / "huge.yaml") == [
        "huge.yaml: larger than 262,144 bytes; is this the right file?"
    ]
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 20_000)
    assert refused(tmp_path / "deep.yaml") == ["deep.yaml: nested too deeply"]


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert problems("\n".join(["l0: &l0 [x]", *levels]), tmp_path)[0].endswith(
        "nested too deeply or too large"
    )
    assert problems("a: &a [*a]", tmp_path)[0].endswith("nested too deeply or too large")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "server:\nmodels:\ncompaction:\n  keep:\n", "---\n", "null\n"]
)
def test_an_empty_file_or_section_means_the_defaults(text: str, tmp_path: Path) -> None:
    assert loaded(text, tmp_path) == load_config(None, HOME).config


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
        f"{P}MODELS__A__WINDOW: models.a.window: {P}MODELS takes all models as one JSON object"
    ]


def test_a_secret_comes_from_a_file_without_one_trailing_newline(tmp_path: Path) -> None:
    environ = {**HOME, P + "SERVER__ADMIN_KEY_FILE": str(tmp_path / "key")}
    (tmp_path / "key").write_text("s3cret\n")
    assert load_config(None, environ).config.server.admin_key.get_secret_value() == "s3cret"
    (tmp_path / "key").write_text("s3cret\n\n")
    assert "server.admin_key: a key holds printable ASCII" in refused(None, environ)[0]


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_secret_s_file_does_not_mean_that_no_key_is_asked_for(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    name = f"{P}SERVER__ADMIN_KEY_FILE"
    assert refused(None, {**HOME, name: str(tmp_path / "key")}) == [
        f"{name}: server.admin_key_file: the file is empty"
    ]


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
        f"{P}SERVER__SECRET_FILE: server.secret: {P}SERVER__SECRET is set too; one of both is enough",
        f"{P}SUMMARY__API_KEY_FILE: summary.api_key_file: the file cannot be read: Is a directory",
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


def test_variables_expand_in_strings(tmp_path: Path) -> None:
    text = 'server: {host: "${H}", port: "${PORT:-42}"}\nsummary: {instructions: "$${A} ${B:-} ${C:-c} $D"}\n'
    config = loaded(text, tmp_path, {**HOME, "H": "::1", "B": "b", "C": ""})
    assert (config.server.host, config.server.port) == ("::1", 42)
    assert config.summary.instructions == "${A} b c $D"


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
    assert line.partition(": ")[2] == f"{place}: this version works only with {working}"


ELSEWHERE = (
    "summary.base_url: another origin than the upstream needs its own summary.api_key, "
    "because a client's credential never goes to a second origin"
)
YAML_BOOLEAN = "(YAML takes a bare on, off, yes or no for true or false)"
NAMES = "anchored, full, selective, split, prune, iterations, chained"
TAIL_PERCENT = "compaction.strategies.anchored.tail_percent"
NOTHING = "a round would win nothing"
FIELDS = "tokens, percent, percent_of_window, messages, turns, iterations, price_tier, cost_optimal"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "compaction: {mode: off}",
            f"compaction.mode: Input should be 'active', 'shadow' or 'bypass' {YAML_BOOLEAN}",
        ),
        ('summary: {model: ""}', "summary.model: String should have at least 1 character"),
        ("compaction: {trigger: [{}]}", f"compaction.trigger: a row names at least one of {FIELDS}"),
        ("compaction: {trigger: {tokens: 5}}", "compaction.trigger: a list is needed"),
        (
            "compaction: {trigger: [{tokens: yes}]}",
            "compaction.trigger.0.tokens: a number is needed, not true or false",
        ),
        ("models: {a: 5}", "models.a: a mapping of keys is needed"),
        ("models: {a: null}", "models.a: a mapping of keys is needed"),
        ("summary: {timeout_s: .inf}", "summary.timeout_s: Input should be a finite number"),
        (
            "server: {base_path: /a/}",
            "server.base_path: a path starts with / and does not end with it, such as /compaction",
        ),
        ('server: {unix_socket: ""}', "server.unix_socket: the path must be absolute"),
        ('server: {unix_socket: "${NO_SUCH_SOCKET:-}"}', "server.unix_socket: the path must be absolute"),
        ("session: {tenant: 'header:'}", "session.tenant: one of credential, none, header:NAME"),
        ("upstream: {base_url: 'https://h:x/'}", "upstream.base_url: not a URL: host or port cannot be read"),
        (
            "upstream: {base_url: 'https://h/v1?a=b'}",
            "upstream.base_url: a base URL has no query, fragment or white space",
        ),
        (
            "upstream: {base_url: 'http://localhost:4141/v1'}",
            "upstream.base_url: this is our own address: requests would go round in circles",
        ),
        ("summary: {base_url: 'https://other/v1'}", ELSEWHERE),
        ("models: {a: {summary: {base_url: 'http://api.openai.com/v1'}}}", f"models.a.{ELSEWHERE}"),
        ("summary: {prompt_file: /nowhere/prompt.md}", "summary.prompt_file: the file cannot be read"),
        ("summary: {prompt_file: /}", "summary.prompt_file: the file cannot be read"),
        (
            "compaction: {strategies: {full: {prompt_file: /nowhere/prompt.md}}}",
            "compaction.strategies.full.prompt_file: the file cannot be read",
        ),
        (
            "compaction: {strategy: anchord}",
            f"compaction.strategy: one of {NAMES}, did you mean 'anchored'?",
        ),
        ("compaction: {strategy: zz}", f"compaction.strategy: one of {NAMES}"),
        ("compaction: {strategy: on}", f"compaction.strategy: Input should be a valid string {YAML_BOOLEAN}"),
        (
            "compaction: {strategies: {spilt: {}}}",
            "compaction.strategies.spilt: unknown key, did you mean 'split'?",
        ),
        (
            "compaction: {strategies: {split: {keep_message: 1}}}",
            "compaction.strategies.split.keep_message: unknown key, did you mean 'keep_messages'?",
        ),
        (
            "compaction: {strategies: {prune: {keep_messages: -1}}}",
            "compaction.strategies.prune.keep_messages: Input should be greater than or equal to 0",
        ),
        (
            "compaction: {strategies: {anchored: {hard_percent: 101}}}",
            "compaction.strategies.anchored.hard_percent: Input should be less than or equal to 100",
        ),
        (
            "compaction: {strategies: {anchored: {target_percent: 100}}}",
            "compaction.strategies.anchored.target_percent: Input should be less than 100",
        ),
        (
            "compaction: {strategies: {selective: {tag: 'a b'}}}",
            "compaction.strategies.selective.tag: a tag holds letters, digits, - and _ only",
        ),
        (
            "compaction: {strategy: full, target_tokens: 200000}",
            f"compaction.target_tokens: 200,000 tokens are not below the trigger of 200,000: {NOTHING}",
        ),
        (
            "models: {a: {window: 8192, compaction: {strategy: split, target_tokens: 50000}}}",
            f"models.a.compaction.target_tokens: 50,000 tokens are not below the trigger of 7,782: {NOTHING}",
        ),
        (
            "compaction: {target_tokens: 9000, keep: {tail_tokens: 9000}}",
            f"compaction.keep.tail_tokens: what stays is not below the target: {NOTHING}",
        ),
        (
            "models: {a: {window: 8192, compaction: {strategies: {anchored: {tail_percent: 50}}}}}",
            f"models.a.{TAIL_PERCENT}: what stays is not below the target: {NOTHING}",
        ),
    ],
)
def test_a_value_that_does_not_work_is_refused_with_its_reason(
    text: str, problem: str, tmp_path: Path
) -> None:
    (line,) = problems(text, tmp_path)
    place, _, what = line.partition(": ")
    assert (place.startswith("config.yaml:1:"), what) == (True, problem)


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("compaction: {trigger: 0}", "trigger", ()),
        ("compaction: {trigger: []}", "trigger", ()),
        ("compaction: {trigger: [{tokens: 0}, {turns: 3}]}", "trigger", (TriggerRow(turns=3),)),
        ("compaction: {background: false}", "background", False),
        ("compaction: {strategy: iterations}", "strategy", "iterations"),
        ("compaction: {recount: probe}", "recount", "probe"),
        ("compaction: {trigger: [{tokens: 9}], target_tokens: 8}", "target_tokens", 8),
        ("compaction: {stand_in_role: system}", "stand_in_role", "system"),
    ],
)
def test_a_value_that_works_is_taken(text: str, place: str, expected: object, tmp_path: Path) -> None:
    assert getattr(loaded(text, tmp_path).compaction, place) == expected


def test_an_own_key_allows_a_summary_model_elsewhere(tmp_path: Path) -> None:
    config = loaded("summary: {base_url: 'https://other/v1/', api_key: k}", tmp_path)
    assert config.summary.base_url == "https://other/v1"


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


@pytest.mark.parametrize(
    "url", ["http://u:hunter2@h", "redis://", "redis://u:hunt er2@h", "redis+x://hunter2@h"]
)
def test_what_is_no_store_is_refused_without_being_shown(url: str, tmp_path: Path) -> None:
    what = "a store is sqlite:///PATH, memory://, or redis://HOST and its relatives"

    assert refused(None, {"REDIS_URL": url}) == [f"store.url: $REDIS_URL: {what}"]
    assert problems(f"store: {{url: {url!r}}}", tmp_path, {}) == [f"config.yaml:1:9: store.url: {what}"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:hunter2@h/0", "redis://u:********@h/0"),
        ("redis://:hun:t@er2@h", "redis://:********@h"),
        (
            "redis+sentinel://u@h/s?sentinel_password=hunter2&prefix=x",
            "redis+sentinel://u@h/s?sentinel_password=********&prefix=x",
        ),
        ("https://h:80/v1", "https://h:80/v1"),
        ("sqlite:////srv/a@b.db", "sqlite:////srv/a@b.db"),
    ],
)
def test_a_password_in_a_url_is_not_shown(url: str, shown: str) -> None:
    assert to_plain_value(url) == shown


def test_a_relative_store_lies_in_the_working_directory(tmp_path: Path) -> None:
    assert loaded("store: {url: 'sqlite:///s.db'}", tmp_path, {}).store.url == f"sqlite:///{tmp_path}/s.db"


def test_without_a_home_it_keeps_what_it_keeps_in_memory_and_says_so(tmp_path: Path) -> None:
    found = load_config(None, {"HOME": ""})
    assert found.config.store.url == "memory://"
    assert [line for line in found.warnings if line.startswith("store.url: memory://")]
    assert problems("store: {url: 'sqlite:///~/x'}", tmp_path, {}) == [
        "config.yaml:1:9: store.url: ~ needs HOME, which is not set"
    ]


def test_clients_keys_are_never_shown_to_the_upstream(tmp_path: Path) -> None:
    assert problems("server: {client_keys: [a]}", tmp_path) == [
        f"config.yaml:1:10: server.client_keys: {UPSTREAM_KEY_MISSING.format('upstream')}"
    ]
    environ = {**HOME, P + "SERVER__CLIENT_KEYS": '["a", "b"]', P + "UPSTREAM__API_KEY": "x"}
    keys = load_config(None, environ).config.server.client_keys
    assert [key.get_secret_value() for key in keys] == ["a", "b"]
    assert (
        "server.client_keys: a key is empty"
        in problems("server: {client_keys: ['']}\nupstream: {api_key: x}", tmp_path)[0]
    )


def test_clients_keys_are_taken_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text('["a", "b"]\n')
    environ = {**HOME, P + "SERVER__CLIENT_KEYS_FILE": str(tmp_path / "keys"), P + "UPSTREAM__API_KEY": "x"}
    keys = load_config(None, environ).config.server.client_keys
    assert [key.get_secret_value() for key in keys] == ["a", "b"]


def test_https_needs_a_certificate_and_its_key(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    assert problems(f"server: {{tls_certificate: {tmp_path}/c}}", tmp_path) == [
        "config.yaml:1:1: server.tls_key: certificate and key are needed together"
    ]
    text = f"server: {{tls_certificate: {tmp_path}/c, tls_key: {tmp_path}/k}}"
    assert problems(text, tmp_path)[0].endswith(": server.tls_key: the file cannot be read")


def test_a_unix_socket_stands_for_host_and_port(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    server = "server: {unix_socket: /run/p.sock, host: 0.0.0.0}"
    file.write_text(f"{server}\nupstream: {{base_url: 'http://127.0.0.1:4141/v1', api_key: b}}\n")
    assert load_config(None, HOME).warnings == ()
    assert problems("server: {unix_socket: p.sock}", tmp_path) == [
        "config.yaml:1:10: server.unix_socket: the path must be absolute"
    ]
    (tmp_path / "c").write_text("")
    text = f"server: {{unix_socket: /p, tls_certificate: {tmp_path}/c, tls_key: {tmp_path}/c}}"
    assert problems(text, tmp_path)[0].endswith(
        "server.tls_certificate: TLS is for host and port, and server.unix_socket takes their place"
    )


def test_a_key_that_anybody_may_spend_leads_to_a_warning(tmp_path: Path) -> None:
    text = "server: {host: 0.0.0.0, admin_key: a}\nupstream: {api_key: b}\n"
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(None, HOME).warnings == (
        "server.host: whoever reaches 0.0.0.0 spends upstream.api_key; name server.client_keys",
    )


def test_what_is_probably_not_meant_leads_to_a_warning(tmp_path: Path) -> None:
    text = "server: {host: 0.0.0.0}\nsession: {tenant: none}\nmodels: {'gpt-*': {}, 'gpt-4*': {}}\n"
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(None, HOME).warnings == (
        "server.host: 0.0.0.0 is open to other machines, and server.admin_key is empty",
        "session.tenant: none lets all clients share their conversations' summaries",
        "models.gpt-4*: never used, because gpt-* stands before it and matches too",
    )


@pytest.mark.parametrize(
    ("text", "where", "name"),
    [
        ("compaction: {strategy: split}\nmodels: {a: {window: 9}, b: {}}", "compaction.strategy", "split"),
        ("models: {a: {compaction: {strategy: split}}}", "models.a.compaction.strategy", "split"),
        ("compaction: {stand_in_role: system}", "compaction.stand_in_role", "anchored"),
    ],
)
def test_summaries_in_the_system_role_lead_to_one_warning(
    text: str, where: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    what = (
        f"{where}: {name} gives its summaries the system role, so that what tools said may pass for an "
        "instruction; compaction.stand_in_role: user prevents that"
    )
    assert load_config(None, HOME).warnings == (what,)


@pytest.mark.parametrize("strategy", ["{strategy: split, stand_in_role: user}", "{strategy: prune}", "{}"])
def test_no_other_role_leads_to_a_warning(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"compaction: {strategy}")
    assert load_config(None, HOME).warnings == ()


def test_a_summary_that_may_take_less_than_it_is_asked_for_leads_to_a_warning(tmp_path: Path) -> None:
    fields = "{summary_tokens: 900, summary_max_tokens: 500}"
    (tmp_path / "config.yaml").write_text(f"compaction: {{strategies: {{full: {fields}}}}}")
    where = "compaction.strategies.full.summary_max_tokens"
    assert load_config(None, HOME).warnings == (
        f"{where}: less than summary_tokens, so no more than this is asked for",
    )


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


@pytest.mark.parametrize(
    "text", ["summary: {prompt_file: NAME}", "compaction: {strategies: {full: {prompt_file: NAME}}}"]
)
def test_a_prompt_of_the_user_s_own_asks_for_no_sections_of_ours(text: str, tmp_path: Path) -> None:
    own = tmp_path / "prompt.md"
    own.write_text("Tell me what was done.\n")
    row = build_policy(get_model_settings(loaded(text.replace("NAME", str(own)), tmp_path), "any"), "full")
    assert row.summary is not None
    assert row.summary.sections == ()


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


@given(st.integers(1, 10**9 - 1), st.sampled_from("smhd"))
def test_a_duration_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_duration(f"{number}{unit}") == number * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
