"""`python -m paceline`, the same as the `paceline` command."""

import sys

if sys.argv[1:2] == ["health"] and "--help" not in sys.argv:
    # Before anything is imported: a container asks every few seconds, and the rest takes half a second of a core.
    from paceline.health import main as ask

    raise SystemExit(ask(sys.argv[2:]))

from paceline.cli import main

main()
