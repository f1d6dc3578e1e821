"""Holds the commands `config show`, `config init` and `config schema`."""

import json
from functools import reduce
from pathlib import Path
from typing import Annotated

import typer

from compaction_proxy.cli.console import (
    FAILED,
    ConfigOption,
    create_group,
    exit_with_error,
    load_config_and_print_warnings,
)

config_app = create_group("Look at the configuration.")
DEFAULT_FILE = Path("config.yaml")

# The file that `config init` writes. It has the few keys that users change. docs/configuration.md describes
# every key.
STARTER = """\
# compaction-proxy: what is left out has its default; `compaction-proxy config show` prints everything.
server:
  host: 127.0.0.1
  port: 4141
  # admin_key: ${COMPACTION_PROXY_ADMIN_KEY}     # needed as soon as others reach the address

upstream:
  base_url: https://api.openai.com/v1
  # api_key: ${OPENAI_API_KEY}                   # left out: each client's own key passes through

store:
  # url: redis://localhost:6379/0                # left out: $REDIS_URL, else a file in the user's data folder
  ttl: 30d

compaction:
  mode: active                                   # active | shadow | bypass
  strategy: anchored

# summary:
#   model: gpt-5.4-mini                          # left out: a cheap model of the upstream's

# models:
#   my-local-*: {window: 32768}
"""


@config_app.command()
def show(
    config: ConfigOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
) -> None:
    """Print every key and its value; secrets are masked."""
    from compaction_proxy.config.keys import format_key_path, iter_keys, to_plain_value

    loaded = load_config_and_print_warnings(config)
    for key in iter_keys():
        path = format_key_path(key.path)
        value = to_plain_value(reduce(getattr, map(str, key.path), loaded.config))
        line = f"{path}: {json.dumps(value, ensure_ascii=False)}"
        print(f"{line}  # {loaded.origins[path]}" if origin else line)


@config_app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to write it.")] = DEFAULT_FILE,
) -> None:
    """Write a configuration with the few lines that people change. What exists is never overwritten."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(STARTER)
    except FileExistsError:
        exit_with_error(f"{file}: exists already, and is left alone", FAILED)
    except OSError as error:
        exit_with_error(f"{file}: cannot be written: {error.strerror}", FAILED)
    print(f"written: {file}")


@config_app.command()
def schema() -> None:
    """Print the configuration's JSON schema, for editors and for checks."""
    from compaction_proxy.config.config import Config

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    print(json.dumps(document, indent=2))
