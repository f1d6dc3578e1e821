"""Values that do not work together are refused or lead to a warning."""

from pathlib import Path

import pytest

from compaction_proxy.config.config import (
    build_policy,
    get_model_settings,
)
from compaction_proxy.config.loader import load_config
from compaction_proxy.config.sections import TriggerRow
from compaction_proxy.config.validation import UPSTREAM_KEY_MISSING
from compaction_proxy.core.strategies import STRATEGIES
from tests.config.test_loader import HOME, P, loaded, problems, refused

ELSEWHERE = (
    "summary.base_url: an origin other than the upstream needs summary.api_key, "
    "because the proxy sends a client's credential only to the upstream"
)


YAML_BOOLEAN = "(YAML reads a bare on, off, yes or no as true or false)"


NAMES = ", ".join(STRATEGIES)


TAIL_PERCENT = "compaction.strategies.anchored.tail_percent"


NOTHING = "compaction would not reduce the request"


FIELDS = "tokens, percent, percent_of_window, messages, turns, iterations, price_tier, cost_optimal"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "compaction: {mode: off}",
            f"compaction.mode: Input should be 'active', 'shadow' or 'bypass' {YAML_BOOLEAN}",
        ),
        ('summary: {model: ""}', "summary.model: String should have at least 1 character"),
        ("compaction: {trigger: [{}]}", f"compaction.trigger: a rule must set at least one of {FIELDS}"),
        ("compaction: {trigger: {tokens: 5}}", "compaction.trigger: expected a list"),
        (
            "compaction: {trigger: [{tokens: yes}]}",
            "compaction.trigger.0.tokens: expected a number, not true or false",
        ),
        ("models: {a: 5}", "models.a: expected a mapping of keys"),
        ("models: {a: null}", "models.a: expected a mapping of keys"),
        ("summary: {timeout_s: .inf}", "summary.timeout_s: Input should be a finite number"),
        (
            "server: {base_path: /a/}",
            "server.base_path: a path must start with / and must not end with /, such as /compaction",
        ),
        ('server: {unix_socket: ""}', "server.unix_socket: the path must be absolute"),
        ('server: {unix_socket: "${NO_SUCH_SOCKET:-}"}', "server.unix_socket: the path must be absolute"),
        ("session: {tenant: 'header:'}", "session.tenant: expected credential, none or header:NAME"),
        (
            "upstream: {base_url: 'https://h:x/'}",
            "upstream.base_url: not a URL: the host or the port is invalid",
        ),
        (
            "upstream: {base_url: 'https://h/v1?a=b'}",
            "upstream.base_url: a base URL must not contain a query, a fragment or white space",
        ),
        (
            "upstream: {base_url: 'http://localhost:4141/v1'}",
            "upstream.base_url: this is the address of the proxy; requests would loop",
        ),
        ("summary: {base_url: 'https://other/v1'}", ELSEWHERE),
        ("models: {a: {summary: {base_url: 'http://api.openai.com/v1'}}}", f"models.a.{ELSEWHERE}"),
        ("summary: {prompt_file: /nowhere/prompt.md}", "summary.prompt_file: the file cannot be read"),
        ("summary: {prompt_file: /}", "summary.prompt_file: the file cannot be read"),
        ("summary: {prompt_file: ~no-such-user/p.md}", "summary.prompt_file: the file cannot be read"),
        (
            "compaction: {strategies: {full: {prompt_file: /nowhere/prompt.md}}}",
            "compaction.strategies.full.prompt_file: the file cannot be read",
        ),
        (
            "compaction: {strategy: anchord}",
            f"compaction.strategy: expected one of {NAMES}, did you mean 'anchored'?",
        ),
        ("compaction: {strategy: zz}", f"compaction.strategy: expected one of {NAMES}"),
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
            "compaction.strategies.selective.tag: a tag can contain only letters, digits, - and _",
        ),
        (
            "compaction: {strategy: full, target_tokens: 200000}",
            f"compaction.target_tokens: 200,000 tokens is not below the trigger of 200,000: {NOTHING}",
        ),
        (
            "models: {a: {window: 8192, compaction: {strategy: split, target_tokens: 50000}}}",
            f"models.a.compaction.target_tokens: 50,000 tokens is not below the trigger of 7,782: {NOTHING}",
        ),
        (
            "compaction: {target_tokens: 9000, keep: {tail_tokens: 9000}}",
            f"compaction.keep.tail_tokens: the messages that stay reach the target: {NOTHING}",
        ),
        (
            "models: {a: {window: 8192, compaction: {strategies: {anchored: {tail_percent: 50}}}}}",
            f"models.a.{TAIL_PERCENT}: the messages that stay reach the target: {NOTHING}",
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
    "url", ["http://u:hunter2@h", "redis://", "redis://u:hunt er2@h", "redis+x://hunter2@h"]
)
def test_what_is_no_store_is_refused_without_being_shown(url: str, tmp_path: Path) -> None:
    what = "expected sqlite:///PATH, memory://, or a Redis URL such as redis://HOST"

    assert refused(None, {"REDIS_URL": url}) == [f"store.url: $REDIS_URL: {what}"]
    assert problems(f"store: {{url: {url!r}}}", tmp_path, {}) == [f"config.yaml:1:9: store.url: {what}"]


def test_clients_keys_are_never_shown_to_the_upstream(tmp_path: Path) -> None:
    assert problems("server: {client_keys: [a]}", tmp_path) == [
        f"config.yaml:1:10: server.client_keys: {UPSTREAM_KEY_MISSING.format('upstream')}"
    ]
    environ = {**HOME, P + "SERVER__CLIENT_KEYS": '["a", "b"]', P + "UPSTREAM__API_KEY": "x"}
    keys = load_config(None, environ).config.server.client_keys
    assert [key.get_secret_value() for key in keys] == ["a", "b"]
    assert (
        "server.client_keys: a key must not be empty"
        in problems("server: {client_keys: ['']}\nupstream: {api_key: x}", tmp_path)[0]
    )


def test_https_needs_a_certificate_and_its_key(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    assert problems(f"server: {{tls_certificate: {tmp_path}/c}}", tmp_path) == [
        "config.yaml:1:1: server.tls_key: set both the certificate and the key"
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
        "server.tls_certificate: TLS does not work with server.unix_socket"
    )


def test_a_key_that_anybody_may_spend_leads_to_a_warning(tmp_path: Path) -> None:
    text = "server: {host: 0.0.0.0, admin_key: a}\nupstream: {api_key: b}\n"
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(None, HOME).warnings == (
        "server.host: every client of 0.0.0.0 can use upstream.api_key; set server.client_keys",
    )


def test_what_is_probably_not_meant_leads_to_a_warning(tmp_path: Path) -> None:
    text = "server: {host: 0.0.0.0}\nsession: {tenant: none}\nmodels: {'gpt-*': {}, 'gpt-4*': {}}\n"
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(None, HOME).warnings == (
        "server.host: 0.0.0.0 is reachable from other machines, but server.admin_key is empty",
        "session.tenant: with none, clients share one tenant and reuse each other's summaries",
        "models.gpt-4*: never used, because gpt-* comes first and matches the same models",
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
        f"{where}: {name} gives its summaries the system role, so the model may follow text of tool results "
        "as instructions; set compaction.stand_in_role to user to prevent this"
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
        f"{where}: lower than summary_tokens, so this value limits the summary",
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
