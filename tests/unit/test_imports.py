"""Who may import whom, and what no file of the package may do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "services" / "paceline"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "v1" not in path.relative_to(PACKAGE).parts)

FOUNDATIONS = {"errors", "identity", "rows", "config", "health", "telemetry", "process", "rpc", "v1"}
ALL_BUT_ROLES = FOUNDATIONS | {"tables", "actors", "snapshot", "envs", "replica", "lag"}

# A module of the package, and the other modules of it that it may import. Anything may import `__version__`.
ARROWS = {
    "errors": set(),
    "identity": {"errors"},
    "rows": {"errors"},
    "config": {"errors"},
    "health": set(),
    "telemetry": {"errors", "health"},
    "process": {"errors"},
    "rpc": FOUNDATIONS - {"rpc"} | {"snapshot"},
    "snapshot": {"errors", "identity", "rows"},
    "actors": {"errors", "identity", "rows"},
    "tables": {"errors", "rows", "lag"},
    "lag": {"errors"},
    "envs": {"errors", "rows", "config", "telemetry"},
    "replica": ALL_BUT_ROLES - {"replica", "tables", "envs"},
    "learner.algorithms": {"errors", "rows", "actors"},
    "replay": FOUNDATIONS | {"tables", "lag"},
    "collector": ALL_BUT_ROLES,
    "evaluator": ALL_BUT_ROLES,
    "learner": ALL_BUT_ROLES | {"serving"},
    # What learner and relay both serve with: neither may import the other, and services meet at the protos only.
    "serving": FOUNDATIONS | {"lag"},
    "relay": FOUNDATIONS | {"lag", "serving"},
    "report": {"errors", "telemetry"},
    "schema": set(),
}
# These start roles, so they may import everything.
STARTERS = {"cli", "local", "__main__"}
HEAVY = {"torch", "gymnasium"}
CODE_IN_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CODE_IN_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"}


def module_of(path: Path) -> str:
    """Which of the named modules a file belongs to: `learner.algorithms` apart from `learner`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "learner.algorithms" if parts[:2] == ("learner", "algorithms") else parts[0]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, inside functions too, but not for the type checker."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides an arrow"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def top_level_imports_of(path: Path) -> set[str]:
    """First parts of the names that are imported as soon as the file is."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def where(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def target_of(name: str) -> str | None:
    """The module of ours that an imported name belongs to, or None."""
    first, _, rest = name.partition(".")
    if first != "paceline" or rest.startswith("__"):
        return None
    return "learner.algorithms" if rest.startswith("learner.algorithms") else rest.partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=where)
def test_a_file_imports_only_what_its_module_may(path):
    module = module_of(path)
    if module in STARTERS or module == "__init__":
        return
    allowed = ARROWS[module] | {module}
    if module == "learner":
        allowed = allowed | {"learner.algorithms"}
    wrong = [
        f"{where(path)}:{line} imports {name}"
        for line, name in imports_of(path)
        if (target := target_of(name)) is not None and target not in allowed
    ]
    assert wrong == []


def test_every_module_has_its_arrows():
    assert {module_of(path) for path in FILES} - STARTERS - {"__init__"} <= ARROWS.keys()


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path) in {"replay", "tables"}], ids=where)
def test_replay_never_imports_torch_or_gymnasium(path):
    assert [name for _, name in imports_of(path) if name.partition(".")[0] in HEAVY] == []


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if module_of(path) in FOUNDATIONS | {"snapshot", "replay", "tables", "serving", "relay"}],
    ids=where,
)
def test_importing_a_foundation_imports_no_torch(path):
    assert not top_level_imports_of(path) & HEAVY


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path) == "tables"], ids=where)
def test_tables_do_no_io(path):
    forbidden = {"socket", "redis", "grpc", "asyncio", "subprocess", "os", "pathlib"}
    assert [name for _, name in imports_of(path) if name.partition(".")[0] in forbidden] == []


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path) not in STARTERS], ids=where)
def test_only_the_starters_read_the_environment(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    reads = [
        f"{where(path)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv", "os.environb"}
    ]
    assert reads == []


@pytest.mark.parametrize("path", FILES, ids=where)
def test_every_call_of_a_peer_has_a_deadline(path):
    without = [
        f"{where(path)}:{call.lineno} {ast.unparse(call.func)}"
        for call in _calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in _rpc_names()
        and "timeout" not in {keyword.arg for keyword in call.keywords}
    ]
    assert without == []


@pytest.mark.parametrize("path", FILES, ids=where)
def test_nothing_that_is_read_can_run_code(path):
    """Snapshots, checkpoints and archives come from others: no unpickling, and no loader that may do it."""
    imported = [name for _, name in imports_of(path) if name.partition(".")[0] in CODE_IN_DATA]
    called = [
        f"{where(path)}:{call.lineno} {ast.unparse(call.func)}"
        for call in _calls(path)
        if ast.unparse(call.func) in CODE_IN_CALLS
    ]
    assert imported + called == []


@pytest.mark.parametrize(
    "module",
    [
        "paceline.replay.main",
        "paceline.learner.endpoint",
        "paceline.learner.endpoint_process",
        "paceline.relay.main",
        "paceline.cli",
        "paceline.collector.writer",
    ],
)
def test_importing_what_needs_no_tensors_loads_no_torch(module):
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def _calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))


def _rpc_names() -> set[str]:
    from paceline.v1 import parameters_pb2, replay_pb2, run_pb2

    return {
        method.name
        for module in (parameters_pb2, replay_pb2, run_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
