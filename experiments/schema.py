"""The typed top level of the config: misspelt keys and wrong types are refused even when they are added with `+`."""

import difflib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, flag_override


@dataclass
class Schema:
    """Every key of `conf/train.yaml`; groups are nested and typed by what they instantiate."""

    n: int = 16
    rounds: int = 300
    seed: int = 0
    batch: int | None = 32
    local_steps: int = 1
    overlap: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    force: bool = False
    evaluate_every: int = 25
    checkpoint_every: int = 0
    resume: str | None = None
    resume_average: bool = False
    track: str = "offline"
    progress: bool = True
    algorithm: Any = None
    compressor: Any = None
    optimizer: Any = None
    scheduler: Any = None
    topology: Any = None
    weights: Any = None
    schedule: Any = None
    task: Any = None
    partition: Any = None
    launch: Any = None
    cost: Any = None
    faults: Any = None
    clock: Any = None
    recipe: Any = None
    study: Any = None


ConfigStore.instance().store(name="schema", node=Schema)
OmegaConf.register_new_resolver("share", lambda part, whole: int(part * whole), replace=True)
KEYS = tuple(field.name for field in fields(Schema))
GROUPS = tuple(field.name for field in fields(Schema) if field.type is Any)
NEEDED = ("algorithm", "schedule", "task", "launch")
FIRST = ("topology", "optimizer", "compressor", "partition", "scheduler")  # the others hold copies of these
LEAST = {"n": 1, "rounds": 0, "seed": 0, "local_steps": 1, "evaluate_every": 1, "checkpoint_every": 0}


def resolved(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain data, every interpolation resolved."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))


def check(config: dict[str, Any]) -> None:
    """What the types of the top level cannot say: unknown keys, ranges, and text where a number or null was meant."""
    for name in config:
        if name not in KEYS:
            raise ValueError(f"{name} is no key of the config: {suggestion(name, KEYS)}")
    if missing := [name for name in KEYS if name not in config or (name in NEEDED and config[name] is None)]:
        raise ValueError(f"the config has no {', '.join(missing)}: a key can be given another value, not be removed")
    for name, low in LEAST.items():
        if config[name] < low:
            raise ValueError(f"{name}={config[name]} is below {low}, the least that makes sense")
    if config["batch"] is not None and config["batch"] < 1:
        raise ValueError(f"batch={config['batch']} is below 1; null means the full batch")
    for name, choices in {"track": ("off", "offline", "online"), "dtype": ("float32", "float64")}.items():
        if config[name] not in choices:
            raise ValueError(f"{name}={config[name]!r} is not one of {', '.join(choices)}")
    try:
        torch.empty(0, device=config["device"])
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device={config['device']!r} cannot be used here ({reason}): device=cpu always can"
        ) from error
    _refuse_none(config, "")
    for name in (*FIRST, *config):
        _refuse_options(config[name], name)


def suggestion(name: str, known: Iterable[str]) -> str:
    """What was meant, if something is near; else all that there is.

    >>> suggestion("compresor", ("algorithm", "compressor")), suggestion("x", ("lr", "momentum"))
    ('did you mean compressor?', 'choose from lr, momentum')
    """
    near = difflib.get_close_matches(name, list(known := tuple(known)), 1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"


def inside(key: str, conf: Path) -> str:
    """Where an option of that name lives, if some group's files have it: "did you mean optimizer.lr?"."""
    for group in GROUPS:
        if any(f"\n{key}:" in file.read_text(encoding="utf-8") for file in (conf / group).glob("*.yaml")):
            return f"did you mean {group}.{key}?"
    return ""


def trim(config: DictConfig, conf: Path) -> list[str]:
    """Removes what a sweep has added (++) for other choices of a group, such as the ratio of TopK in
    `-m compressor=topk,sign ++compressor.ratio=0.1`, and returns the keys."""
    foreign = []
    for group in GROUPS:
        node = config.get(group)
        if not isinstance(node, DictConfig) or (options := _signature(node.get("_target_"))[0]) is None:
            continue
        of_others = "".join(file.read_text(encoding="utf-8") for file in (conf / group).glob("*.yaml"))
        strange = (n for n in map(str, node) if n not in options and not n.startswith("_"))
        for name in [n for n in strange if f"\n{n}:" in of_others]:
            with flag_override(node, ["struct", "readonly"], [False, False]):
                del node[name]
            foreign.append(f"{group}.{name}")
    return foreign


def _signature(target: Any) -> tuple[Mapping[str, inspect.Parameter] | None, dict[str, Any]]:
    """The options of a `_target_`, None where it takes any or cannot be read, and their types."""
    try:
        found = pkgutil.resolve_name(target)
        options = inspect.signature(found).parameters
        hints = typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except Exception:  # no target, or one without a readable signature: instantiating it will tell
        return None, {}
    return (None if any(p.kind is p.VAR_KEYWORD for p in options.values()) else options), hints


def _refuse_none(node: Any, path: str) -> None:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, str) and value in ("None", "none", "nil"):
            raise ValueError(f"{name}={value} is text here: for no value write {name}=null")
        _refuse_none(value, name)


def _refuse_options(node: Any, path: str) -> None:
    """Options that a `_target_` does not have, and text or null where it takes a number."""
    if not isinstance(node, dict):
        return
    options, hints = _signature(node.get("_target_"))
    for name, value in node.items():
        if name.startswith("_"):
            continue
        if options is not None and name not in options:
            others = [o for o in options if o != "params" and not o.startswith("_")] or ["nothing"]
            raise ValueError(f"{path}.{name} is no option of {node['_target_']}: {suggestion(name, others)}")
        hint = hints.get(name)
        kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        kind = "a number" if float in kinds else "a whole number" if int in kinds else "true or false"
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError(f"{path}.{name}={str(value).lower()}, and {node['_target_']} takes {kind} there")
        if isinstance(value, float) and int in kinds and not {float, str} & {*kinds}:
            raise ValueError(f"{path}.{name}={value}, and {node['_target_']} takes a whole number there")
        if kinds == (bool,) and not isinstance(value, bool):
            raise ValueError(f"{path}.{name}={value}, and {node['_target_']} takes true or false there")
        if (int in kinds or float in kinds) and str not in kinds:
            if isinstance(value, str):
                raise ValueError(f"{path}.{name}={value} is text, and {node['_target_']} takes a number there")
            if value is None and types.NoneType not in kinds:
                raise ValueError(f"{path}.{name}=null, and {node['_target_']} needs a number there")
        if not _fits(value, hint):
            said = re.sub(r"\w+\.|<class '|'>", "", str(hint))
            raise ValueError(f"{path}.{name}={value}, and {node['_target_']} takes {said} there")
        _refuse_options(value, f"{path}.{name}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether plain data may be meant by a type; of types that are no plain data everything may.

    >>> from collections.abc import Sequence
    >>> [_fits(value, Sequence[int] | None) for value in ([0, 1], None, 5, ["a"])]
    [True, True, False, False]
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in inner)
    if isinstance(value, dict):  # to be instantiated
        return True
    if origin in (Sequence, list, tuple):
        kinds = (
            inner if origin is tuple and ... not in inner else inner[:1] * len(value if isinstance(value, list) else ())
        )
        return isinstance(value, list) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return value is None if hint is types.NoneType else True
