"""Defines the command `doctor`, which looks for problems and suggests a fix for each."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from compaction_proxy.cli.exit import BAD_CONFIG, FAILED, ConfigOption, JsonOption, UpstreamOption
from compaction_proxy.cli.output import Column, format_table, print_json, print_lines
from compaction_proxy.core.errors import ConfigError

if TYPE_CHECKING:
    from compaction_proxy.config.loader import LoadedConfig

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"


class Finding(NamedTuple):
    """A result of a check.

    Attributes:
        level: `ok`, `note`, `warning` or `error`. An error keeps the proxy from working.
        topic: What was checked, such as `store`.
        what: The result in words.
        fix: What to do about the result. Empty if nothing needs to be done.
    """

    level: str
    topic: str
    what: str
    fix: str = ""


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

    from compaction_proxy.config.loader import ConfigOverride, load_config

    overrides = [] if upstream is None else [ConfigOverride("--upstream", ("upstream", "base_url"), upstream)]
    try:
        loaded = load_config(config, os.environ, overrides)
    except ConfigError as error:
        fix = "correct it; `compaction-proxy config schema` and docs/configuration.md describe every key"
        findings = [Finding(ERROR, "configuration", line, fix) for line in str(error).splitlines()]
        code = BAD_CONFIG
    else:
        findings = asyncio.run(_run_checks(loaded, probe=probe))
        code = FAILED if any(each.level == ERROR for each in findings) else 0
    if as_json:
        print_json({"findings": [each._asdict() for each in findings]})
    else:
        print_lines(format_findings(findings))
    raise typer.Exit(code)


async def _run_checks(loaded: "LoadedConfig", *, probe: bool) -> list[Finding]:
    """Runs all checks and returns their findings: first local checks, then those of store and upstream."""
    import os

    from compaction_proxy.cli.doctor import host, store, upstream

    findings = [
        Finding(OK, "configuration", str(loaded.path or "built-in defaults and the environment")),
        *(
            Finding(WARNING, "configuration", line, "change it, or leave it where it is meant")
            for line in loaded.warnings
        ),
        *host.check_host(loaded.config, os.environ),
    ]
    findings += [each async for each in store.check_store(loaded.config)]
    findings += [each async for each in upstream.check_upstream(loaded.config, probe=probe)]
    return findings


def format_findings(findings: Iterable[Finding]) -> list[str]:
    """Formats a table with a line for each finding.

    Lines are not cut to the width of the terminal, because the fix is at the end of the line.
    """
    columns = (Column("result"), Column("topic"), Column("finding"))
    rows = [
        (each.level, each.topic, f"{each.what}; fix: {each.fix}" if each.fix else each.what)
        for each in findings
    ]
    return format_table(columns, rows, None)
