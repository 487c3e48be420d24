"""Configuration: everything has a default, mistakes are told with their path, equal backends are one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.commands.exits import UsageError
from gateway.commands.gateway import run
from gateway.config.config import ConfigError, key_secret, load_config, parse_config
from gateway.fleet.settings import normalise_backend_url
from gateway.main import make_parser


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "homing.yaml"
    path.write_text(text)
    return path


def test_no_file_means_defaults() -> None:
    """A gateway starts without any configuration."""
    config = load_config(None)
    assert (config.listen.port, config.sessions.store, config.backends) == (8000, "memory", ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("routing: {polcy: homing}", "routing: unknown key `polcy`"),
        ("listen: {port: eight}", "listen.port: Expected `int`, got `str`"),
        ("listen: {port: 70000}", "port must be 0..65535"),
        ("backends: [{url: 'ftp://a'}]", "backends[0]: base_url 'ftp://a'"),
        ("backends: [{url: 'http://a', engine: gpt}]", "engine 'gpt' is not one of"),
        ("backends: [{url: 'http://a'}, {url: 'HTTP://A:80/v1/'}]", "two backends have the id"),
        ("backends: [{id: x, url: 'http://a'}, {id: y, url: 'http://a:80/'}]", "have the same url"),
        ("workers: 2", "set sessions.store: redis"),
        ("log: {level: loud}", "level must be"),
        ("sessions: {ttl_s: 0}", "ttl_s must be greater than 0"),
        ("a: 1\na: 2", "key 'a' is given twice"),
        ("[", "is not valid YAML"),
        ("just text", "Expected `object`, got `str`"),
    ],
)
def test_mistakes_are_one_line_with_their_place(tmp_path: Path, text: str, expected: str) -> None:
    """Each message names the file, the path inside it and what is wrong."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert expected in message
    assert str(path) in message
    assert "\n" not in message


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    """No traceback for a wrong path."""
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    """A file of comments configures nothing."""
    assert load_config(write(tmp_path, "# nothing yet\n")) == parse_config({})


def test_equivalent_urls_are_spelt_alike() -> None:
    """B07: a trailing slash, /v1, an explicit default port or capitals do not make another backend."""
    spellings = ("http://a", "http://a/", "HTTP://A:80", "http://a:80/v1", "http://a/v1/")
    assert {normalise_backend_url(url) for url in spellings} == {"http://a:80"}


def test_a_name_is_made_from_the_address() -> None:
    """Backends without an id get a readable, stable one."""
    config = parse_config({"backends": [{"url": "http://gpu-1.local:8000"}]})
    assert config.backends[0].backend_id == "gpu-1.local-8000"


def test_the_key_secret_comes_from_the_environment() -> None:
    """Replicas that share the variable agree on keys."""
    assert key_secret({"HOMING_KEY_SECRET": "s"}) == b"s"
    assert key_secret({}) == key_secret({"HOMING_KEY_SECRET": ""})


def test_a_recording_that_cannot_be_written_is_told_as_that(tmp_path: Path) -> None:
    """Not as a port in use."""
    path = tmp_path / "missing" / "decisions.jsonl"
    options = make_parser(wanted="gateway").parse_args(["gateway", "--port", "0", "--record", str(path)])
    with pytest.raises(UsageError, match=f"--record: cannot write {path}: No such file"):
        run(options)
