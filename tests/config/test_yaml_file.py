"""What a YAML file may hold, and how a file that cannot be read is refused."""

from pathlib import Path

import pytest

from compaction_proxy.config.loader import load_config
from tests.config.test_loader import HOME, P, loaded, problems, refused


def test_all_problems_come_at_once_one_line_each(tmp_path: Path) -> None:
    text = "servr: {}\nstore: {ttl: 3 days}\nupstream: {base_url: 'ftp://x'}\n"
    environ = {**HOME, P + "SERVER__PORT": "70000", P + "SERVER__PRT": "1", P + "MODELS": "{"}
    assert problems(text, tmp_path, environ) == [
        f"{P}MODELS: models: not JSON at character 2: Expecting property name enclosed in double quotes",
        f"{P}SERVER__PRT: server.prt: unknown key, did you mean 'port'?",
        f"{P}SERVER__PORT: server.port: Input should be less than or equal to 65535",
        "config.yaml:3:12: upstream.base_url: a URL must start with http:// or https:// and contain a host",
        "config.yaml:2:9: store.ttl: expected a duration such as 90s, 15m, 12h or 30d",
        "config.yaml:1:1: servr: unknown key, did you mean 'server'?",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("server:\n\tport: 1\n", "config.yaml:2:1: not YAML: a tab; use spaces to indent YAML"),
        ("- a\n", "config.yaml:1:1: expected a mapping of sections, such as `server:`"),
        ("just text", "config.yaml:1:1: expected a mapping of sections, such as `server:`"),
        ("server:\n  port: 1\n  port: 2\n", "config.yaml:3:3: duplicate key 'port'"),
        ("server: {[1]: 2}\n", "config.yaml:1:10: a key must be plain text"),
        ("server: {port: !!int x}\n", "config.yaml:1:16: not a valid int"),
        ("store: !x y", "config.yaml:1:8: not YAML: could not determine a constructor for the tag '!x'"),
        ("a: 1\n---\nb: 1\n", "config.yaml:2:1: not YAML: but found another document"),
        ("server: {host: *nobody}\n", "config.yaml:1:16: not YAML: found undefined alias 'nobody'"),
        (
            'server: {host: "${NO}"}\n',
            "config.yaml:1:16: ${NO} is not set; use ${NO:-default} to set a default",
        ),
        ("x: \x01\n", "config.yaml: not YAML: the file contains a character that is not allowed"),
    ],
)
def test_a_file_that_cannot_be_understood_leads_to_one_clear_line(
    text: str, line: str, tmp_path: Path
) -> None:
    assert problems(text, tmp_path)[0] == line


def test_a_file_that_cannot_be_read_leads_to_one_clear_line(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent.yaml") == [
        "absent.yaml: cannot read the file: No such file or directory"
    ]
    (tmp_path / "latin.yaml").write_bytes(b"server: {}\n# caf\xe9\n")
    assert refused(tmp_path / "latin.yaml") == ["latin.yaml:2: not UTF-8"]
    (tmp_path / "huge.yaml").write_bytes(b"#" * 300_000)
    assert refused(tmp_path / "huge.yaml") == [
        "huge.yaml: the file is larger than 262,144 bytes; check the path"
    ]
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 20_000)
    assert refused(tmp_path / "deep.yaml") == ["deep.yaml: nested too deeply"]


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert problems("\n".join(["l0: &l0 [x]", *levels]), tmp_path)[0].endswith(
        "nested too deeply or too large"
    )
    assert problems("a: &a [*a]", tmp_path)[0].endswith("nested too deeply or too large")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "server:\nmodels:\ncompaction:\n  keep:\n", "---\n", "null\n"]
)
def test_an_empty_file_or_section_means_the_defaults(text: str, tmp_path: Path) -> None:
    assert loaded(text, tmp_path) == load_config(None, HOME).config


def test_variables_expand_in_strings(tmp_path: Path) -> None:
    text = 'server: {host: "${H}", port: "${PORT:-42}"}\nsummary: {instructions: "$${A} ${B:-} ${C:-c} $D"}\n'
    config = loaded(text, tmp_path, {**HOME, "H": "::1", "B": "b", "C": ""})
    assert (config.server.host, config.server.port) == ("::1", 42)
    assert config.summary.instructions == "${A} b c $D"
