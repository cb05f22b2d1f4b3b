"""Imports run one way, stay light, and torch.distributed has one door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {package: sorted((ROOT / package).rglob("*.py")) for package in ("graphs", "gossip", "experiments")}
DOORS = {"gossip/transport.py", "gossip/live.py"}


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = list(path.relative_to(ROOT).parent.parts)
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name} | {f"{name}.{alias.name}" for alias in node.names}
    return found


def top(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_the_packages_are_found():
    assert all(len(files) > 5 for files in FILES.values())
    assert "gossip.network" in imports(ROOT / "gossip" / "algorithms" / "dpsgd.py")  # relative imports are resolved


def test_imports_run_one_way():
    wrong = [f for f in FILES["graphs"] if top(f) & {"gossip", "experiments"}]
    wrong += [f for f in FILES["gossip"] if "experiments" in top(f)]
    assert wrong == []


def test_only_the_transport_knows_torch_distributed():
    users = {
        str(f.relative_to(ROOT)) for f in FILES["gossip"] + FILES["graphs"]
        if any(name.startswith("torch.distributed") for name in imports(f)) or "torch.distributed." in code(f)
    }  # fmt: skip
    assert users <= DOORS
    assert "gossip/transport.py" in users


def code(path: Path) -> str:
    """A file without its comments and strings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


@pytest.mark.parametrize("package", ["gossip", "graphs"])
def test_importing_is_light(package):
    program = (
        f"import sys, {package}; "
        "print(*sorted({m.split('.')[0] for m in sys.modules} & "
        "{'hydra', 'omegaconf', 'wandb', 'sklearn', 'matplotlib', 'torch_geometric', 'gossip', 'experiments'}))"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == (["gossip"] if package == "gossip" else [])


def test_an_algorithm_is_one_short_file():
    for path in (ROOT / "gossip" / "algorithms").glob("[!_]*.py"):
        classes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
        assert sum(any(ast.unparse(b) == "Algorithm" for b in c.bases) for c in classes) == 1, path.name
        assert len(path.read_text().splitlines()) <= 100, path.name
