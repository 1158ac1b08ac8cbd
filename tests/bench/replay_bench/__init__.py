"""Replay's throughput beside what it is measured against; `tests/bench/replay.py` is the command.

`measures` holds what is compared with what, and what is aimed at. Each suite (`gather`, `service`, `recovery`,
`following`, `training`) has turns that are taken one after another in every round, so that all of them see the same
moods of the machine. Servers (`product`, `bare`) and `clients` run in processes of their own (`processes`).
"""
