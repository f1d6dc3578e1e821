"""A configuration that takes another's place: what takes effect at once, and what waits for a start."""

from compaction_proxy.config.config import (
    RESTART_KEYS,
    Config,
    ConfigChange,
    compare_configs,
    format_key_path,
    get_model_settings,
    iter_keys,
)


def config(**sections: object) -> Config:
    return Config.model_validate(sections)


def test_what_is_the_same_changes_nothing() -> None:
    old = config(models={"a": {"window": 5_000}})
    new = config(models={"a": {"window": 5_000}})
    assert compare_configs(old, new) == ConfigChange(new, (), ())


def test_a_strategy_and_a_client_s_key_take_effect_at_once() -> None:
    old = config()
    new = config(compaction={"strategy": "chained"}, server={"client_keys": ["k" * 20]})
    step = compare_configs(old, new)
    assert (step.changed, step.waiting_for_restart) == (("server.client_keys", "compaction.strategy"), ())
    assert get_model_settings(step.config, "any").compaction.strategy == "chained"


def test_a_port_and_a_store_wait_for_the_next_start_and_the_rest_does_not_wait_for_them() -> None:
    old = config(server={"port": 1})
    new = config(
        server={"port": 2, "admin_key": "a" * 20},
        store={"url": "memory://"},
        models={"a": {"window": 5_000}},
    )
    step = compare_configs(old, new)
    assert step.waiting_for_restart == ("server.port", "store.url")
    assert step.changed == ("server.admin_key", "models")
    assert (step.config.server.port, step.config.store.url) == (1, None)
    assert step.config.server.admin_key.get_secret_value() == "a" * 20
    assert get_model_settings(step.config, "a").window == 5_000


def test_every_key_that_waits_exists() -> None:
    known = {format_key_path(key.path) for key in iter_keys()}
    assert all(name in known or any(each.startswith(f"{name}.") for each in known) for name in RESTART_KEYS)
