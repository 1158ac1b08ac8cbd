import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from paceline.process import limit_threads

# One compute thread, as every process of a run has: before a test imports numpy or torch.
limit_threads(os.environ)

# The same examples in every run, and no example fails for being slow on a busy machine.
settings.register_profile("paceline", deadline=None, derandomize=True)
settings.load_profile("paceline")

END_TO_END = Path(__file__).parent / "e2e"
SHARES_OF_THEIR_OWN = ("test_compose.py", "test_bench_replay.py", "test_lag.py")
"""Of the files there: as long as many others together, and every port that they use is a free one."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if END_TO_END in item.path.parents:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share tests out by files, whose tests have servers in common; most whole systems are one share, since some own
    fixed ports.

    (Marks of groups would say so, too, and are not looked at by the two plugins in their present versions.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Shares(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "e2e" if "/e2e/" in file and not file.endswith(SHARES_OF_THEIR_OWN) else file

    return Shares(config, log)
