"""Print what a pyproject.toml says that an extra needs: an image installs it before the code is there.

python3 requirements.py pyproject.toml EXTRA
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(file: Path, extra: str) -> list[str]:
    """The requirements of the package and of one of its extras. Raises KeyError when there is no such extra."""
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"][extra]]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), sys.argv[2])))
