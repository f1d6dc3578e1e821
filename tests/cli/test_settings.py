"""`config init` and `config schema`."""

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import load_config

Run = Callable[..., Result]


def test_init_writes_a_configuration_that_says_the_defaults(run: Run, tmp_path: Path) -> None:
    assert run("config", "init").stdout == "written: config.yaml\n"
    store = Config().store
    assert load_config(tmp_path / "config.yaml", {}).config.model_copy(update={"store": store}) == Config()


def test_every_line_of_it_may_be_taken_in(run: Run, tmp_path: Path) -> None:
    run("config", "init")
    file = tmp_path / "config.yaml"
    first, *rest = file.read_text().splitlines()
    taken = [line.replace("# ", "", 1) if line.strip().startswith("# ") else line for line in rest]
    file.write_text("\n".join([first, *taken]))
    environ = {"COMPACTION_PROXY_ADMIN_KEY": "a", "OPENAI_API_KEY": "b"}
    found = load_config(file, environ).config
    assert (found.server.admin_key.get_secret_value(), found.summary.model) == ("a", "gpt-5.4-mini")
    assert found.models["my-local-*"].window == 32_768


def test_init_leaves_alone_what_exists(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("server: {}\n")
    done = run("config", "init", "mine.yaml")
    assert (done.exit_code, done.stderr) == (1, "mine.yaml: already exists and was not changed\n")
    assert (tmp_path / "mine.yaml").read_text() == "server: {}\n"


def test_schema_describes_every_section(run: Run) -> None:
    described = json.loads(run("config", "schema").stdout)
    assert list(described["properties"]) == list(Config.model_fields)
    assert described["additionalProperties"] is False
