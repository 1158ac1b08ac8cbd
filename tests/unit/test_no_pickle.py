import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "services" / "paceline"
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
CALLS = {"torch.load", "torch.save", "torch.jit.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
ARGUMENTS = {"allow_pickle", "weights_only"}


def faults(tree: ast.AST) -> Iterator[str]:
    """What of a module could turn bytes into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            yield from (name for name in names if name in CALLS or name.split(".")[0] in MODULES)
            if node.module.startswith("multiprocessing") and {"Pipe", "Queue"} & {alias.name for alias in node.names}:
                yield f"{node.module}: its pipes and queues pickle"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg in ARGUMENTS)


def test_nothing_in_the_source_can_turn_bytes_into_code() -> None:
    found = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*.py")
        if (names := list(faults(ast.parse(path.read_text()))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "from torch import load",
        "torch.load(path)",
        "x = torch.save",
        "numpy.load(path, allow_pickle=True)",
        "from multiprocessing import Pipe",
        "yaml.load(text)",
    ],
)
def test_each_way_is_seen(line: str) -> None:
    assert list(faults(ast.parse(line)))
