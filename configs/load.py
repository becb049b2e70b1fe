"""YAML file + dotted overrides -> RunConfig. The only reader of YAML and of Ratchet's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.schema import RunConfig
from configs.secrets import is_secret_name, redact, secret_in


class ConfigError(ValueError):
    """A configuration that cannot be used: one line per fault, each with key, value and what was expected."""


def load_config(path: str | Path, *, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Read `path`, apply `overrides` (`"a.b=value"` strings, or a mapping of dotted keys; strings are
    read as YAML) and validate.

    A file may start from another with `extends: other.yaml` (relative to itself) and then holds only its
    differences. `${NAME}` and `${NAME:-default}` in string values are read from the environment. A
    configuration is written to disk and shown, so secrets are refused in it.

    Raises ConfigError.
    """
    tree = _read(Path(path), seen=())
    pairs = list(overrides.items()) if isinstance(overrides, Mapping) else [_split(text) for text in overrides]
    pairs = [(key, _value(key, value) if isinstance(value, str) else value) for key, value in pairs]
    for key, value in pairs:
        _set(tree, key, value)
    try:
        return RunConfig.model_validate(_expand(tree))
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {redact(line)}" for line in explain(error))) from None


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key may stand once: a second one would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping at `node`. Raises ConstructorError."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def explain(error: ValidationError) -> list[str]:
    """One line per fault: dotted key, what was expected, what was found."""
    lines, faults = [], error.errors()
    for fault in faults:
        if fault["type"] == "too_short" and any(_is_below(other["loc"], fault["loc"]) for other in faults):
            continue  # the list is short only because an item of it is wrong
        key = ".".join(str(part) for part in fault["loc"]) or "config"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "union_tag_not_found":
            tag = fault["ctx"]["discriminator"].strip("'")
            message = f"expected the key {tag} that says which one is meant; found {sorted(fault['input'])}"
        elif fault["type"] == "extra_forbidden":
            message = "unknown key; see configs/schema.py for what may be asked"
        elif fault["type"] != "value_error" and not isinstance(fault["input"], dict | list):
            message = f"{message}; found {fault['input']!r}"
        lines.append(f"{key}: {message}")
    return lines


def _is_below(key: tuple[int | str, ...], parent: tuple[int | str, ...]) -> bool:
    return len(key) > len(parent) and key[: len(parent)] == parent


def _read(path: Path, *, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p) for p in seen)}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file (looked from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        tree = _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(tree).__name__}")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    return _merge(_read(path.parent / str(base), seen=(*seen, path.resolve())), tree)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Deep merge; a mapping that names another `kind` or `name` replaces the base's instead."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _other_variant(old, value):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _other_variant(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return any(tag in new and new[tag] != old.get(tag, new[tag]) for tag in ("kind", "name"))


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r}: expected key=value, for example algorithm.kl_coef=0.02")
    return key, value


def _value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override '{key}={text}': the value is not YAML") from None


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node: Any = tree
    for depth, part in enumerate(parents):
        if isinstance(node, list):
            node = _item(node, part, dotted)
            continue
        child = node.get(part)
        if not isinstance(child, dict | list):
            child = node[part] = {}
        node = child
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {dotted}: {'.'.join(parents[: depth + 1])} holds no keys")
    if isinstance(node, list):
        _item(node, last, dotted)
        node[int(last)] = value
    else:
        node[last] = value


def _item(items: list[Any], part: str, dotted: str) -> Any:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"override {dotted}: {part!r} is not an index below {len(items)}")
    return items[int(part)]


def _expand(node: Any, *, key: str = "") -> Any:
    """Replace ${NAME} and ${NAME:-default} in every string. Refuses what would put a secret into the configuration."""
    if isinstance(node, dict):
        return {name: _expand(value, key=f"{key}.{name}".strip(".")) for name, value in node.items()}
    if isinstance(node, list):
        return [_expand(value, key=f"{key}.{index}".strip(".")) for index, value in enumerate(node)]
    if not isinstance(node, str):
        return node
    text = _with_variables(node, key=key)
    found = secret_in(text)
    if found:
        raise ConfigError(
            f"{key}: expected no secret, because the configuration is written to disk and shown; found {found} "
            "(not repeated here); take it out, and name the variable in token_env where there is such a key"
        )
    return text


def _with_variables(text: str, *, key: str) -> str:
    if "${" not in text:
        return text
    head, _, rest = text.partition("${")
    name, _, tail = rest.partition("}")
    name, has_default, default = name.partition(":-")
    if is_secret_name(name):
        raise ConfigError(
            f"{key}: expected no secret, because the configuration is written to disk and shown; found ${{{name}}}; "
            f"take it out, and set token_env to {name} where there is such a key"
        )
    value = os.environ.get(name, default if has_default else None)
    if value is None:
        raise ConfigError(f"environment variable {name} is not set and has no default (in {text!r})")
    return f"{head}{value}{_with_variables(tail, key=key)}"
