"""Defines the command `doctor`, which looks for problems and suggests a fix for each."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compaction_proxy.cli.exit import BAD_CONFIG, FAILED
from compaction_proxy.cli.options import ConfigOption, JsonOption, UpstreamOption
from compaction_proxy.cli.output import print_json, print_lines
from compaction_proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from compaction_proxy.cli.doctor.finding import Finding
    from compaction_proxy.config.loader import LoadedConfig


def doctor(
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Ask the summary model for one word; its provider may charge for it."),
    ] = False,
    upstream: UpstreamOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look for what is wrong, and say what mends it. Ends with 1 if something keeps it from working."""
    import asyncio
    import os

    from compaction_proxy.cli.doctor.finding import ERROR, format_findings
    from compaction_proxy.config.loader import ConfigOverride, load_config

    overrides = [] if upstream is None else [ConfigOverride("--upstream", ("upstream", "base_url"), upstream)]
    try:
        loaded = load_config(config, os.environ, overrides)
    except ConfigError as error:
        findings, code = _list_config_errors(error), BAD_CONFIG
    else:
        findings = asyncio.run(_collect_findings(loaded, probe=probe))
        code = FAILED if any(each.level == ERROR for each in findings) else 0
    if as_json:
        print_json({"findings": [each._asdict() for each in findings]})
    else:
        print_lines(format_findings(findings))
    raise typer.Exit(code)


def _list_config_errors(error: ConfigError) -> "list[Finding]":
    from compaction_proxy.cli.doctor.finding import ERROR, Finding

    fix = "correct it; `compaction-proxy config schema` and docs/configuration.md describe every key"
    return [Finding(ERROR, "configuration", line, fix) for line in str(error).splitlines()]


async def _collect_findings(loaded: "LoadedConfig", *, probe: bool) -> "list[Finding]":
    return [each async for each in _run_checks(loaded, probe=probe)]


async def _run_checks(loaded: "LoadedConfig", *, probe: bool) -> "AsyncIterator[Finding]":
    """Runs all checks and yields their findings: first local checks, then those of store and upstream."""
    import os

    from compaction_proxy.cli.doctor import host, store
    from compaction_proxy.cli.doctor import upstream as provider
    from compaction_proxy.cli.doctor.finding import OK, WARNING, Finding

    yield Finding(OK, "configuration", str(loaded.path or Path("built-in defaults and the environment")))
    for line in loaded.warnings:
        yield Finding(WARNING, "configuration", line, "change it, or leave it where it is meant")
    for each in host.check_host(loaded.config, os.environ):
        yield each
    async for each in store.check_store(loaded.config):
        yield each
    async for each in provider.check_upstream(loaded.config, probe=probe):
        yield each
