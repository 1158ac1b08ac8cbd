"""How snapshots spread to many collectors, with and without relays; `tests/bench/scale.py` is the command.

`real` runs real processes and measures what they cost; `model` plays the same with those costs, for more collectors
than a machine has room for; `plan` says which settings are played; `report` tells of both.
"""
