"""The command line. Each command imports what it needs when it runs: `health` and `--help` must be quick."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from proxy.errors import ConfigError, ProxyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.config.environment import Setting
    from proxy.config.sources import Loaded

BAD_CONFIG = 2
INTERRUPTED = 130

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Default: $COMPACTION_PROXY_CONFIG, else ./config.yaml."),
]

app = typer.Typer(
    name="compaction-proxy",
    help="An OpenAI-compatible proxy that keeps long conversations fitting.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")


def _fail(error: ProxyError, code: int) -> NoReturn:
    print(error, file=sys.stderr)
    raise typer.Exit(code)


def _loaded(path: Path | None, options: "Iterable[Setting]" = ()) -> "Loaded":
    """The configuration, or the end of the process with a line for each problem."""
    from proxy.config.sources import load

    try:
        loaded = load(path, os.environ, options)
    except ConfigError as error:
        _fail(error, BAD_CONFIG)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    upstream: Annotated[str | None, typer.Option(help="Base URL of the provider.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the port.")] = None,
) -> None:
    """Run the proxy until it is told to end."""
    from proxy import logs
    from proxy.cli.foreground import announce, run_one
    from proxy.cli.workers import run_workers
    from proxy.config.environment import Setting

    given = (
        Setting("--host", ("server", "host"), host),
        Setting("--port", ("server", "port"), port),
        Setting("--upstream", ("upstream", "base_url"), upstream),
        Setting("--workers", ("server", "workers"), workers),
    )
    loaded = _loaded(config, [option for option in given if option.value is not None])
    try:
        logs.configure(loaded.config.observability.log_format)
        if loaded.config.server.workers > 1:
            run_workers(loaded.config, lambda url: announce(loaded.config, url))
        else:
            run_one(loaded.config)
    except ConfigError as error:
        _fail(error, BAD_CONFIG)
    except ProxyError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def check(config: ConfigOption = None) -> None:
    """Say whether the configuration can be used."""
    loaded = _loaded(config)
    print(f"ok: {loaded.path or 'built-in defaults and the environment'}")


@config_app.command()
def show(
    config: ConfigOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
) -> None:
    """Print every key and its value; secrets are masked."""
    from proxy.cli.listing import lines

    loaded = _loaded(config)
    for line in lines(loaded, with_origin=origin):
        print(line)


@app.command()
def health(
    url: Annotated[str | None, typer.Option(help="Base URL of the proxy; default: as configured.")] = None,
) -> None:
    """Exit with 0 if a running proxy is ready, with 1 if not. For container health checks."""
    from proxy.cli.probe import is_ready, local_url

    if url is None:
        server = _loaded(None).config.server
        ready, what = is_ready(local_url(server), server.unix_socket)
    else:
        ready, what = is_ready(url)
    print(what)
    raise typer.Exit(0 if ready else 1)


@app.command()
def forget(
    credential: Annotated[str, typer.Option(help="Header that the client shows, or a file that holds it.")],
    session: Annotated[str | None, typer.Option(help="Header that names one session; default: all.")] = None,
    config: ConfigOption = None,
) -> None:
    """Delete what is stored of a client, such as --credential 'authorization: Bearer sk-…'."""
    import asyncio

    from proxy.cli.forget import forget as delete

    shown = Path(credential).read_text("utf-8") if Path(credential).is_file() else credential
    try:
        fields = [_field(shown)]
        number = asyncio.run(delete(_loaded(config).config, fields, [_field(session)] if session else None))
    except ProxyError as error:
        _fail(error, 1)
    print(f"{number} records deleted")


def _field(text: str) -> tuple[bytes, bytes]:
    """A header field as it would arrive."""
    name, colon, value = text.strip().partition(":")
    if not colon:
        raise ProxyError("a header is written as 'name: value'")
    return name.strip().lower().encode(), value.strip().encode()


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave proxy and provider running.")] = False,
) -> None:
    """Watch a long conversation outgrow its model's window and go on. No key, no network."""
    from proxy.demo.run import main as run_demo

    raise typer.Exit(run_demo(keep=keep))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("compaction-proxy"))
