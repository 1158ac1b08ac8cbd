"""Calls that bypass the generated stubs have a deadline too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "services" / "paceline"
MAKERS = {"unary_unary", "unary_stream", "stream_unary", "stream_stream"}


def calls_without_deadline(source: str) -> list[str]:
    """Calls without `timeout=` of what was assigned from `channel.stream_stream(...)` or its like."""
    tree = ast.parse(source)
    made = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in MAKERS
        for target in node.targets
    }
    return [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).removesuffix(".future").removesuffix(".with_call") in made
        and "timeout" not in {keyword.arg for keyword in node.keywords}
    ]


def test_the_check_sees_a_call_without_a_deadline():
    source = "self._append = channel.stream_stream('/x')\nself._append(requests)\nself._append(requests, timeout=3)"
    assert calls_without_deadline(source) == ["line 2: self._append"]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if "v1" not in path.parts and "channel." in path.read_text()],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_every_call_over_a_channel_has_a_deadline(path):
    assert calls_without_deadline(path.read_text(encoding="utf-8")) == []
