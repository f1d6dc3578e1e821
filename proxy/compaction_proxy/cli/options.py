"""Defines the options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Default: $COMPACTION_PROXY_CONFIG, else ./config.yaml."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table, for programs.")]
UpstreamOption = Annotated[str | None, typer.Option("--upstream", help="Base URL of the provider.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Base URL of the proxy; default: as configured.")
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file", metavar="FILE", help="Holds the admin key; default: the configured one."
    ),
]
SessionArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Id of a conversation, or as much of it as no other begins with.")
]
