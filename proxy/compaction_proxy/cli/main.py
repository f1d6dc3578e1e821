"""Defines the program `compaction-proxy` and its commands.

Each command imports most of its modules only when it runs, so that `--help` starts quickly.
"""

import json
from functools import partial, reduce
from pathlib import Path
from typing import Annotated

import typer

from compaction_proxy.cli.admin_client import AdminClient, create_local_client
from compaction_proxy.cli.connect import connect
from compaction_proxy.cli.console import (
    FAILED,
    ConfigOption,
    JsonOption,
    UpstreamOption,
    YesOption,
    confirm_deletion,
    create_group,
    exit_with_error,
    format_quantity,
    load_config_and_print_warnings,
    parse_header,
    print_json,
    show_progress,
)
from compaction_proxy.cli.health import check_health
from compaction_proxy.cli.mcp import mcp
from compaction_proxy.cli.models import models
from compaction_proxy.cli.replay import replay
from compaction_proxy.cli.run import run
from compaction_proxy.cli.savings import savings
from compaction_proxy.cli.sessions import search, sessions_app
from compaction_proxy.cli.ui import ui
from compaction_proxy.cli.watch import watch

config_app = create_group("Show and check the configuration.")
DEFAULT_FILE = Path("config.yaml")

# Content of the file that `config init` writes, with the few keys that users often change.
# docs/configuration.md describes every key.
STARTER = """\
# compaction-proxy: keys that are not set keep their defaults; `compaction-proxy config show` prints all.
server:
  host: 127.0.0.1
  port: 4141
  # admin_key: ${COMPACTION_PROXY_ADMIN_KEY}     # default: generated at the first start, on loopback only

upstream:
  base_url: https://api.openai.com/v1
  # api_key: ${OPENAI_API_KEY}                   # default: each client's own key is forwarded

store:
  # url: redis://localhost:6379/0                # default: $REDIS_URL, or a file in your data folder
  ttl: 30d

compaction:
  mode: active                                   # active | shadow | bypass
  strategy: anchored

# summary:
#   model: gpt-5.4-mini                          # default: a cheap model of the upstream

# models:
#   my-local-*: {window: 32768}
"""


@config_app.command()
def show(
    config: ConfigOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Print the source of each value.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every configuration key and its value. Secrets are masked."""
    from compaction_proxy.config.config import format_key_path, iter_keys, to_plain_value

    loaded = load_config_and_print_warnings(config)
    values = {
        format_key_path(key.path): to_plain_value(reduce(getattr, map(str, key.path), loaded.config))
        for key in iter_keys()
    }
    if as_json:
        rows = {
            path: {"value": value, "origin": loaded.origins[path]} if origin else value
            for path, value in values.items()
        }
        print_json(rows)
        return
    for path, value in values.items():
        line = f"{path}: {json.dumps(value, ensure_ascii=False)}"
        print(f"{line}  # {loaded.origins[path]}" if origin else line)


@config_app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = DEFAULT_FILE,
) -> None:
    """Write a configuration file with the few keys that users often change. Never overwrites a file."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(STARTER)
    except FileExistsError:
        exit_with_error(f"{file}: already exists and was not changed", FAILED)
    except OSError as error:
        exit_with_error(f"{file}: cannot write the file: {error.strerror}", FAILED)
    print(f"wrote {file}")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of the configuration, for editors and validators."""
    from compaction_proxy.config.config import Config

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    print(json.dumps(document, indent=2))


app = create_group(
    "An OpenAI-compatible proxy that keeps long conversations within the model's context window.",
    "compaction-proxy",
)


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. 0 selects a free port.")] = None,
    upstream: UpstreamOption = None,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes.")] = None,
) -> None:
    """Start the proxy. Press Ctrl+C to stop it."""
    import gc
    import os

    gc.disable()  # nothing of what start-up creates is garbage; `tune_interpreter` enables it again
    try:
        from compaction_proxy.cli.admin_key import add_admin_key
        from compaction_proxy.cli.serve import announce_start, run_single_process
        from compaction_proxy.cli.workers import run_workers
        from compaction_proxy.config.loader import ConfigOverride, LoadedConfig, load_config
        from compaction_proxy.telemetry import logs

        overrides = (
            ConfigOverride("--host", ("server", "host"), host),
            ConfigOverride("--port", ("server", "port"), port),
            ConfigOverride("--upstream", ("upstream", "base_url"), upstream),
            ConfigOverride("--workers", ("server", "workers"), workers),
        )
        options = [option for option in overrides if option.value is not None]
        loaded = add_admin_key(load_config_and_print_warnings(config, options))
        logs.configure_service_logging(loaded.config.observability)

        def reread() -> LoadedConfig:
            reloaded = load_config(config, os.environ, options)
            return add_admin_key(reloaded, running=loaded.config.server)

        if loaded.config.server.workers > 1:
            gc.enable()
            run_workers(loaded, reread, partial(announce_start, loaded))
        else:
            run_single_process(loaded, reread)
    finally:
        gc.enable()


@app.command()
def check(config: ConfigOption = None) -> None:
    """Validate the configuration without a connection to the store or to a provider."""
    from compaction_proxy.cli.serve import check_start

    loaded = load_config_and_print_warnings(config)
    check_start(loaded.config)
    print(f"ok: {loaded.path or 'built-in defaults and the environment'}")


@app.command()
def health(
    url: Annotated[
        str | None, typer.Option(help="Base URL of the proxy. Default: from the configuration.")
    ] = None,
) -> None:
    """Check whether the proxy is ready. The exit code is 0 if it is ready, otherwise 1."""
    if url is None:
        client = create_local_client(load_config_and_print_warnings(None).config.server)
    else:
        client = AdminClient(url)
    raise typer.Exit(check_health(client))


@app.command()
def forget(
    credential: Annotated[
        str, typer.Option(help="Header with the client's credential, or a file that contains it.")
    ],
    session: Annotated[
        str | None, typer.Option(help="Header that identifies one session. Default: all sessions.")
    ] = None,
    yes: YesOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete all stored data of a client. Example: --credential 'authorization: Bearer sk-…'."""
    import asyncio

    from compaction_proxy.cli.forget import forget_client

    settings = load_config_and_print_warnings(config).config
    credential_field = _encode_header(credential)
    session_field = _encode_header(session) if session else None
    target = f"the session {session}" if session else "the client with this credential"
    confirm_deletion(f"Permanently delete all stored data of {target}?", yes=yes)
    with show_progress("deleting"):
        number = asyncio.run(forget_client(settings, credential_field, session_field))
    if as_json:
        print_json({"deleted": number})
    else:
        print(f"{format_quantity(number, 'record')} deleted")


def _encode_header(text: str) -> list[tuple[bytes, bytes]]:
    name, value = parse_header(text)
    # A value that is not UTF-8 comes from the command line with surrogates in place of its bytes.
    return [(name.encode("utf-8", "surrogateescape"), value.encode("utf-8", "surrogateescape"))]


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep the proxy and the provider running.")] = False,
) -> None:
    """Run a conversation that outgrows the model's context window, without and with the proxy.

    Needs no key and no network.
    """
    from compaction_proxy.cli.demo.run import main as run_demo

    raise typer.Exit(run_demo(keep=keep))


@app.command("demo-provider")
def demo_provider(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 selects a free port.")] = 4140,
    window: Annotated[int, typer.Option(help="Context window of the model, in tokens.")] = 8192,
) -> None:
    """Start the demo provider. Its replies are scripted, and it calls no model."""
    import asyncio

    from compaction_proxy.cli.demo.provider import serve_provider

    asyncio.run(serve_provider(host, port, window))


@app.command()
def version() -> None:
    """Print the version."""
    import importlib.metadata

    print(importlib.metadata.version("compaction-proxy"))


def _print_version_and_exit(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def _handle_options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version_and_exit, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Defines the options of the program itself, such as `--version`."""


def doctor(
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Call the summary model once. The provider may charge for the call."),
    ] = False,
    upstream: UpstreamOption = None,
    port: Annotated[int | None, typer.Option(help="Port of the proxy.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the configuration, this machine, the store and the upstream, and suggest fixes.

    The exit code is 1 if a problem prevents the proxy from working, and 2 if the configuration is invalid.
    """
    from compaction_proxy.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(config, upstream, port, probe=probe, as_json=as_json))


app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run)
app.command()(connect)
app.command()(replay)
app.command()(doctor)
app.command()(mcp)
app.command()(models)
app.command()(savings)
app.command()(search)
app.command()(ui)
app.command()(watch)
app.add_typer(sessions_app, name="sessions")
app.add_typer(config_app, name="config")
