"""Short names for what runs differ in: their components as they were chosen, else their classes, else the options."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import records
from experiments.records import Run

Choices = dict[tuple[str, str], str]


def choices(runs: list[Run]) -> Choices:
    """What the components of the runs' configs were chosen as: (key, component) → the file of Hydra's group."""
    chosen: Choices = {}
    for run in runs:
        for group, name in run.header.get("choices", {}).items():
            *_, key = path = group.split("/")
            chosen[key, dump(records.setting(get(run.config, ".".join(path))))] = name
    return chosen


def called(key: str, value: Any, chosen: Choices) -> str:
    """What a value was chosen as, or its class where that is not on record."""
    key = key.rpartition(".")[2]
    return chosen.get((key, dump(value)), "lockstep" if key == "clock" and not value else short(value))


def describe(
    values: Sequence[Any], key: str = "", chosen: Choices | None = None, without: Sequence[str] = ()
) -> list[str]:
    """A short name for each value: of a component what it was chosen as, or its class where that is not on record; and
    only where two of a name differ, what they differ in, but for the keys `without`.

    >>> topk, sign = {"_target_": "gossip.TopK", "ratio": 0.1}, {"_target_": "gossip.Sign"}
    >>> choco = {"_target_": "gossip.Choco", "gamma": 0.2}
    >>> describe([{"_target_": "gossip.DPSGD"}, {**choco, "compressor": topk}, {**choco, "compressor": sign}])
    ['DPSGD', 'Choco TopK', 'Choco Sign']
    """
    chosen = chosen or {}
    names = [called(key, v, chosen) for v in values]
    values = [{k: w for k, w in v.items() if k not in without} if isinstance(v, Mapping) else v for v in values]
    for name in set(names):
        same = [i for i, n in enumerate(names) if n == name and isinstance(values[i], Mapping)]
        kinds = len({dump(values[i]) for i in same})
        inner = {k: [values[i].get(k) for i in same] for k in dict.fromkeys(k for i in same for k in values[i])}
        told = {k: _pieces(k, v, chosen) for k, v in inner.items() if len({dump(w) for w in v}) > 1}
        enough = [pieces for k, pieces in told.items() if len(set(pieces)) == kinds]
        components = [pieces for pieces in enough if not any("=" in p for p in pieces)]
        for pieces in (components or enough)[:1] or told.values():
            for i, piece in zip(same, pieces):
                names[i] += f" {piece}" if piece else ""
    return names


def _pieces(key: str, values: Sequence[Any], chosen: Choices) -> list[str]:
    texts = describe(values, key, chosen)
    return ["" if v is None else t if isinstance(v, Mapping) else f"{key}={t}" for v, t in zip(values, texts)]


def mixed(label: str, members: list[Run], by: Sequence[str], chosen: Choices) -> list[str]:
    """A warning where a group holds runs that differ in more than their seed."""
    configs = [records.setting(r.config) for r in members]
    flat = [records.flat(config) | _as_chosen(config, chosen) for config in configs]
    patterns: dict[tuple[str, ...], str] = {}  # a value that several keys repeat is named by the shortest of them
    told: dict[str, tuple[str, ...]] = {}
    for key in sorted({k for f in flat for k in f}, key=lambda k: (k.count("."), k)):
        values = tuple(short(f.get(key)) for f in flat)
        above = [names for k, names in told.items() if key.startswith(f"{k}.")]
        follows = any(len(set(zip(names, values))) == len(set(names)) for names in above)
        if len(set(values)) > 1 and not follows and not any(key == b or key.startswith(f"{b}.") for b in by):
            told[key] = values
            patterns.setdefault(values, key)
    if not patterns:
        return []
    shown = "; ".join(f"{key}: {', '.join(sorted(set(values)))}" for values, key in list(patterns.items())[:4])
    more = f" and {len(patterns) - 4} more" if len(patterns) > 4 else ""
    return [
        f"{label} averages runs that differ in more than the seed ({shown}{more}): name such a key in by=, or select "
        "runs by it"
    ]


def _as_chosen(config: Mapping[str, Any], chosen: Choices) -> dict[str, str]:
    keys = ((path, (path.rpartition(".")[2], dump(get(config, path)))) for path in paths(config))
    return {path: chosen[key] for path, key in keys if key in chosen}


def get(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, or None."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def short(value: Any) -> str:
    """A value as a word: of a component its class."""
    if isinstance(value, Mapping):
        if "_target_" in value or "kind" in value:
            return str(value.get("_target_", value.get("kind"))).rsplit(".", 1)[-1]
        return "+".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def paths(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """All dotted keys of a config, those of its components too."""
    inner = [p for k, v in config.items() if isinstance(v, Mapping) for p in paths(v, f"{prefix}{k}.")]
    return [f"{prefix}{k}" for k in config] + inner


def dump(value: Any) -> str:
    """A text that is the same for equal values."""
    return json.dumps(records.encode(value), sort_keys=True)
