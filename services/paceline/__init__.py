"""Paceline: reinforcement learning with separate services and a policy lag that is known."""

__version__ = "0.1.0"
