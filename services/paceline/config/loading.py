"""Settings from their sources, and what is wrong with them in words."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from paceline.config.models import Config, TableConfig, redact_url
from paceline.errors import ConfigError

ENVIRONMENT_PREFIX = "PACELINE_"

_EXPECTED = {
    "int_parsing": "expected a whole number",
    "tuple_type": "expected a list, such as [256, 256]",
    "model_type": "expected a section with keys of its own",
    "dict_type": "expected keys and values, such as {key: value}",
}
"""In place of pydantic's own words, which are about Python's types."""

_SERVICE_NAMES = re.compile(r"_SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def load(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Build the configuration from a YAML file, `PACELINE_*` variables and `key=value` overrides.

    Raises:
        ConfigError: names each wrong key, its value, what was expected and the nearest known key.
    """
    tree, origins = _read_yaml(path) if path else {}, {}
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENVIRONMENT_PREFIX) and not _is_of_kubernetes(name, value):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _set_path(tree, key, _parse_value(value, name), source=name)
            origins[key] = f"variable {name}"
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"argument {override!r}: expected key=value, such as run.seed=1")
        _set_path(tree, key, _parse_value(value, key), source=override)
        origins[key] = "command line"
    return build(tree, source=str(path) if path else "the settings", origins=origins)


def build(tree: Mapping[str, Any], *, source: str = "the settings", origins: Mapping[str, str] | None = None) -> Config:
    """Check a tree of plain values and make a Config of it. Raises ConfigError.

    Args:
        source: where its values are from, for messages.
        origins: by their keys, the values that are from elsewhere, and where from.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(problem, origins or {}) for problem in error.errors()]
        raise ConfigError("\n".join([f"{len(lines)} wrong setting(s) in {source}:", *lines])) from None


def with_run_id(config: Config, run_id: str) -> Config:
    """The same configuration for a run of that id. Raises ConfigError when the id is malformed."""
    run = build({"run": {**config.run.model_dump(), "id": run_id}}).run
    return config.model_copy(update={"run": run})


def dump(config: Config) -> str:
    """The configuration as YAML, every default written out, passwords hidden."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe() -> str:
    """Every setting as Markdown, one table per section: key, default, meaning. README holds it, and a test compares."""
    lines: list[str] = []
    for section, top in Config.model_fields.items():
        assert isinstance(top.annotation, type)
        lines += [
            "",
            f"**{section}**: {top.annotation.__doc__}",
            "",
            "| key | default | meaning |",
            "| --- | --- | --- |",
        ]
        for key, field, is_section in _settings_of(top.annotation, f"{section}.", "NAME"):
            if not is_section:
                default = json.dumps(field.default, default=str)
                lines.append(f"| `{key}` | `{default}` | {' '.join((field.description or '').split())} |")
    return "\n".join(lines).strip() + "\n"


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML's own would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} comes twice in one section: expected it once", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; presets lie in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__name__}: expected sections such as run:, env:, learner:")
    return tree


def _is_of_kubernetes(name: str, value: str) -> bool:
    """Whether it tells a pod of a Service named paceline or paceline-..., as it does every pod of the namespace.

    https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    """
    if "__" in name:
        return False  # every setting's name has these
    return bool(_SERVICE_NAMES.search(name)) or (name.endswith("_PORT") and bool(_SERVICE_ADDRESS.match(value)))


def _parse_value(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: the value {text!r} is not valid YAML: {error}") from error


def _set_path(tree: dict[str, Any], key: str, value: Any, *, source: str) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        # A section that the file leaves empty reads as None.
        if tree.get(parent) is None:
            tree[parent] = {}
        tree = tree[parent]
        if not isinstance(tree, dict):
            raise ConfigError(f"{source}: {parent!r} is a value, not a section")
    tree[leaf] = value


def _explain(problem: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location) or "(whole file)"
    # A section's value may be what is wrong, or one deep within what was given.
    origin = next((origins[part] for part in accumulate(location, "{}.{}".format) if part in origins), None)
    named = key if origin is None else f"{key} ({origin})"
    # A URL may stand under a misspelt key, too.
    shown = "***" if location[-1:] == ["redis_url"] else redact_url(repr(problem["input"]))
    if problem["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(key, list(_known_keys(location)), n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        return f"  {named}: unknown key (value {shown}){hint}"
    if problem["type"] == "value_error" and not location:
        return f"  {problem['ctx']['error']!s}"
    message = _EXPECTED.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    return f"  {named}: {shown}: {message[0].lower()}{message[1:]}"


def _known_keys(location: Iterable[str]) -> Iterator[str]:
    """Every dotted key of the tree; the names of tables are taken from the key that was asked for."""
    names = list(location)
    table = names[2] if names[:2] == ["replay", "tables"] and len(names) > 2 else "transitions"
    yield from _keys_of(Config, "", table)


def _keys_of(model: type[BaseModel], prefix: str, table: str) -> Iterator[str]:
    for key, _, _ in _settings_of(model, prefix, table):
        yield key


def _settings_of(model: type[BaseModel], prefix: str, table: str) -> Iterator[tuple[str, FieldInfo, bool]]:
    """Every dotted key below a model, with its field, and whether it is a section."""
    for name, field in model.model_fields.items():
        key, annotation = f"{prefix}{name}", field.annotation
        section = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
        is_table = TableConfig in get_args(annotation)
        yield key, field, section is not None or is_table
        if section is not None:
            yield from _settings_of(section, f"{key}.", table)
        elif is_table:
            yield from _settings_of(TableConfig, f"{key}.{table}.", table)
