"""The typed top level of the config: misspelt keys and wrong types are refused even when they are added with `+`."""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore


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
    recipe: Any = None
    study: Any = None


ConfigStore.instance().store(name="schema", node=Schema)


def check(config: dict[str, Any]) -> None:
    """What types cannot say: ranges, and text where null was meant."""
    for name, low in {"n": 1, "rounds": 0, "local_steps": 1, "evaluate_every": 1, "checkpoint_every": 0}.items():
        if config[name] < low:
            raise ValueError(f"{name}={config[name]} is below {low}, the least that makes sense")
    if config["batch"] is not None and config["batch"] < 1:
        raise ValueError(f"batch={config['batch']} is below 1; null means the full batch")
    for name, choices in {"track": ("off", "offline", "online"), "dtype": ("float32", "float64")}.items():
        if config[name] not in choices:
            raise ValueError(f"{name}={config[name]!r} is not one of {', '.join(choices)}")
    _refuse_none(config, "")


def _refuse_none(node: Any, path: str) -> None:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, str) and value in ("None", "none", "nil"):
            raise ValueError(f"{name}={value} is text here: for no value write {name}=null")
        _refuse_none(value, name)
