"""`serve`: builds the proxy, runs it in the foreground, and says how to reach it."""

import asyncio
from collections.abc import Iterator

from proxy import logs, serving
from proxy.app import create_app
from proxy.config.model import Config, for_model
from proxy.core.budget import budget
from proxy.core.trigger import mark
from proxy.policies import policy_for

DEFAULT_WINDOW_TOKENS = 128_000


def _trigger(config: Config) -> str:
    """When a model compacts that no entry of `models` names, in words."""
    policy = policy_for(for_model(config, ""))
    spending = budget(DEFAULT_WINDOW_TOKENS, policy.reserves, None)
    tokens = mark(policy.trigger, spending)
    if tokens is None:
        return "never by itself"
    size = f"at {tokens:,} of {DEFAULT_WINDOW_TOKENS:,} tokens" if tokens else "by count"
    return f"{size}, unless the model's window is known to be another"


def banner(config: Config, url: str) -> Iterator[str]:
    """What a user needs to know at start-up, line by line."""
    compaction = config.compaction
    yield f"compaction-proxy listens on {url}"
    yield f"  upstream  {config.upstream.base_url}"
    yield f"  store     {config.store.url}"
    if compaction.mode == "bypass":
        yield "  strategy  none: compaction.mode is bypass"
    else:
        shadow = " (shadow: reported, not done)" if compaction.mode == "shadow" else ""
        yield f"  strategy  {compaction.strategy}, {_trigger(config)}{shadow}"
    if config.models:
        yield f"  models    {', '.join(config.models)} have settings of their own"
    yield f"  client    export OPENAI_BASE_URL={url}/v1"


def run_proxy(config: Config) -> None:
    """Run until SIGINT or SIGTERM.

    Raises:
        ConfigError: The address cannot be listened on, or the application refuses the configuration.
        ProxyError: The application did not start.
    """
    logs.configure(config.observability.log_format)
    log = logs.logger(__name__)
    running = serving.server(create_app(config))
    bound = serving.listen(config.server.host, config.server.port)
    url = serving.base_url(bound)

    def started() -> None:
        print("\n".join(banner(config, url)), flush=True)
        log.info(logs.SERVING_STARTED, url=url, upstream=config.upstream.base_url)

    with asyncio.Runner(loop_factory=running.config.get_loop_factory()) as runner:
        try:
            runner.run(serving.run(running, bound, started))
        finally:
            log.info(logs.SERVING_STOPPED)
