"""What was measured of a run and what it was set to, as plain figures, and advice drawn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """The settings that the advice may name, with the values that the run had."""

    publish_every_updates: int
    updates_per_step: float | None
    """None: updates run free."""
    collector_count: int
    max_blocks_in_flight: int
    block_seconds: float
    table: str
    capacity_rows: int
    is_queue: bool = False
    window_rows: int | None = None
    """Width of the limiter's band; None: there is none."""
    shards: int = 1
    max_lag_versions: int | None = None
    injected: str | None = None
    """`lag.inject.mode`, if it is not none."""
    prefetch_batches: int | None = None
    """Batches ordered ahead; None: the learner draws from a ring of its own."""
    checkpoint_every_updates: int = 10_000
    learner_threads: int = 1
    cores: int | None = None
    """Of the machine, where the whole run is on one that is known."""


@dataclass(frozen=True)
class Distribution:
    """Of a lag in versions; infinity: beyond the largest bucket."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Figures:
    """What was measured of a run; None, or no entry, where it is not known."""

    settings: Settings
    training_lag: Distribution | None = None
    """Over rows that were trained on."""
    acting_lag: Distribution | None = None
    """Over environment steps."""
    part_versions: Mapping[str, float] = field(default_factory=dict)
    """Versions of training lag, by part, over all rows."""
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    trained_rows: float | None = None
    collector_shares: Mapping[str, float] = field(default_factory=dict)
    """Shares (0 to 1) of the collectors' time, by activity."""
    learner_shares: Mapping[str, float] = field(default_factory=dict)
    """Shares (0 to 1) of the training loop's time, by activity."""
    updates_per_second: float | None = None
    table_rows: float | None = None
    skipped_rows: float = 0
    """Draws of rows beyond the bound that were not made because of it."""
    masked_rows: float = 0
    """Draws of rows beyond the bound that were made, and had no weight."""
    starved_share: float = 0.0
    """Of the learner's time: without rows within the bound."""
    smallest_bound: int | None = None
    """Under which it would have been so for less than a hundredth of its time."""


@dataclass(frozen=True)
class Option:
    """A setting that may be changed, to what, and what that costs."""

    setting: str
    before: str
    value: str
    trades: str
    """What the change costs and what for, as a sentence."""

    def __str__(self) -> str:
        return f"{self.setting}={self.value} (now {self.before}). {self.trades}"


@dataclass(frozen=True)
class Advice:
    """One finding, and the setting that changes it; no setting where nothing needs to change."""

    rule: str
    finding: str
    setting: str | None = None
    value: str | None = None
    before: str | None = None
    trades: str = ""
    """As of an option."""
    further: tuple[Option, ...] = ()
    """Other settings, for when that one is changed: what costs learning comes last."""
    otherwise: str = ""
    """Another way out, as a sentence."""

    @classmethod
    def choose(cls, rule: str, finding: str, options: Sequence[Option], otherwise: str = "") -> Advice:
        """The first option, and the others after it."""
        first, *rest = options
        return cls(
            rule, finding, first.setting, first.value, first.before, first.trades, tuple(rest), otherwise=otherwise
        )

    def __str__(self) -> str:
        if self.setting is None:
            return " ".join(filter(None, (self.finding, self.otherwise)))
        remedy = f"Set {self.setting}={self.value} (now {self.before})."
        further = (f"Then set {option}" for option in self.further)
        return " ".join(filter(None, (self.finding, remedy, self.trades, *further, self.otherwise)))


def change(setting: str, before: float | str, value: float | str) -> tuple[str, str, str]:
    """Setting, value and value before, as `Advice` takes them."""
    return setting, number(value), number(before)


def number(value: float | str) -> str:
    """As it stands in a settings file."""
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def percent(share: float) -> str:
    """A share of 0 to 1; a small one is not said to be none."""
    return f"{share:.0%}" if share == 0 or share >= 0.01 else "less than 1%"
