"""A counting environment that takes a step only when a test lets it, registered as `gated_environment:Gated-v0`."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium

from counting_environment import Counting

SECONDS = 20.0


class Gate:
    """Lets steps pass one by one, and knows when the next one waits: its action is chosen then."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = self.taken = 0
        self._is_waiting = self._is_open = False

    def reset(self) -> None:
        """Begin anew, closed."""
        with self._changed:
            self._allowed = self.taken = 0
            self._is_waiting = self._is_open = False

    def open(self) -> None:
        """Let every step pass from now on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def allow(self, steps: int = 1) -> None:
        """Let so many steps pass, and do not wait for them."""
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    def take(self, steps: int = 1) -> None:
        """Let so many steps pass, and wait until the one after them has its action and waits in turn."""
        self.allow(steps)
        self.wait_for_choice()

    def wait_for_choice(self) -> None:
        """Wait until the step after all that were allowed has its action."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_waiting and self.taken == self._allowed, SECONDS), (
                f"step {self.taken + 1} has no action after {SECONDS} s"
            )

    def wait_for_steps(self) -> None:
        """Wait until all steps that were allowed are taken."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.taken == self._allowed, SECONDS)

    def pass_through(self) -> None:
        """Called by the environment: wait for the permit."""
        with self._changed:
            self._is_waiting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_open or self.taken < self._allowed)
            self.taken += 1
            self._is_waiting = False
            self._changed.notify_all()

    @property
    def is_waiting(self) -> bool:
        """Whether a step waits for its permit."""
        return self._is_waiting


GATE = Gate()
"""Of all these environments; a test uses one."""


class Gated(Counting):
    """As `Counting`, behind the gate."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        GATE.pass_through()
        return super().step(action)


if "Gated-v0" not in gymnasium.registry:
    gymnasium.register("Gated-v0", entry_point="gated_environment:Gated")
