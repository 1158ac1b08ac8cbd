import os
from pathlib import Path

import pytest
from hypothesis import settings

from paceline.process import limit_threads

# One compute thread, as every process of a run has: before a test imports numpy or torch.
limit_threads(os.environ)

# The same examples in every run, and no example fails for being slow on a busy machine.
settings.register_profile("paceline", deadline=None, derandomize=True)
settings.load_profile("paceline")

END_TO_END = Path(__file__).parent / "e2e"


@pytest.hookimpl(tryfirst=True)  # before the plugin that shares out the tests looks at their groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if END_TO_END in item.path.parents:
            item.add_marker(pytest.mark.slow)
            # One whole system at a time, as some own fixed ports; in containers they have ports of their own.
            item.add_marker(pytest.mark.xdist_group("containers" if item.path.stem == "test_compose" else "e2e"))
        else:
            # A file stays together, for the sake of what its tests share.
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
