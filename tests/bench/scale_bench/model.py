"""A simulation, event by event, of snapshots on their way from the learner to collectors.

Every process has a core, its own or one that it shares, and every machine a network card; both serve one piece of work
after the other. A server sends to its readers in turn, chunk by chunk, as the event loop of the real one does. A relay
passes a snapshot on when it has all of it. A reader asks again as soon as it has applied, and then gets the newest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """Processor seconds of one piece of work: `fixed`, and for each byte."""

    fixed: float
    per_byte: float

    def of(self, size: int) -> float:
        return self.fixed + self.per_byte * size


@dataclass(frozen=True)
class Costs:
    """What each step costs, as it was measured."""

    publish: Cost
    """The endpoint takes a snapshot from the training process."""
    publish_wait_seconds: float
    """From the hand-over until the snapshot is served, without the processor's part: the version goes to disk."""
    endpoint_send: Cost
    """The endpoint sends a snapshot to one reader; the reader's next poll is part of it."""
    relay_take: Cost
    """A relay receives and verifies a snapshot."""
    relay_send: Cost
    """A relay sends a snapshot to one reader."""
    collector_take: Cost
    """A collector receives and verifies a snapshot."""


@dataclass(frozen=True)
class Setting:
    """What is played."""

    collectors: int
    depth: int
    """Relays between the endpoint and each collector."""
    fan_out: int
    """Readers of one relay."""
    snapshot_bytes: int
    chunk_bytes: int
    publish_seconds: float
    """Between two snapshots."""
    snapshots: int
    bandwidth_bytes: float = float("inf")
    """That a machine sends in a second."""
    latency_seconds: float = 0.0
    """One way between two machines."""
    servers_share_a_core: bool = False
    collectors_share_a_core: bool = False
    """As on one small machine; otherwise each process has a core."""


@dataclass
class Outcome:
    """What came of it."""

    delays: list[float] = field(default_factory=list)
    """Seconds from publication until a collector has applied, for each snapshot that it got."""
    endpoint_cpu_share: float = 0.0
    endpoint_bytes_per_second: float = 0.0
    relay_cpu_share: float = 0.0
    """Of the busiest relay."""
    relays: int = 0
    skipped_share: float = 0.0
    """Of all snapshots times collectors: a newer one came first."""


class _Line:
    """Serves one piece of work after the other."""

    def __init__(self) -> None:
        self.free_at = self.busy = 0.0

    def take(self, now: float, seconds: float) -> float:
        """When work that is handed in now is done."""
        self.free_at = max(self.free_at, now) + seconds
        self.busy += seconds
        return self.free_at


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


class _Server:
    """The endpoint, or the serving half of a relay."""

    def __init__(self, clock: _Clock, setting: Setting, core: _Line, send: Cost) -> None:
        self.clock, self.setting, self.core, self.send = clock, setting, core, send
        self.card = _Line()
        self.newest = 0
        self.sent_bytes = 0
        self.cpu_seconds = 0.0
        self._waiting: list[_Reader] = []

    def work(self, seconds: float) -> float:
        self.cpu_seconds += seconds
        return self.core.take(self.clock.now, seconds)

    def serve(self, version: int) -> None:
        self.newest = version
        waiting, self._waiting = self._waiting, []
        for reader in waiting:
            self._begin(reader)

    def poll(self, reader: _Reader) -> None:
        if self.newest > reader.have:
            self._begin(reader)
        else:
            self._waiting.append(reader)

    def _begin(self, reader: _Reader) -> None:
        version = self.newest
        self.clock.at(self.work(self.send.fixed), lambda: self._chunk(reader, version, 0))

    def _chunk(self, reader: _Reader, version: int, start: int) -> None:
        size = min(self.setting.chunk_bytes, self.setting.snapshot_bytes - start)
        last = start + size >= self.setting.snapshot_bytes

        def sent() -> None:
            self.sent_bytes += size
            leaves = self.card.take(self.clock.now, size / self.setting.bandwidth_bytes)
            self.clock.at(leaves + self.setting.latency_seconds, lambda: reader.receive(version, size, last))
            if not last:
                self._chunk(reader, version, start + size)

        self.clock.at(self.work(self.send.per_byte * size), sent)


class _Reader:
    """A collector, or the polling half of a relay."""

    def __init__(
        self, clock: _Clock, setting: Setting, upstream: _Server, core: _Line, take: Cost, taken: Callable[[int], None]
    ) -> None:
        self.clock, self.setting, self.upstream, self.core = clock, setting, upstream, core
        self.take, self.taken = take, taken
        self.have = 0
        self.cpu_seconds = 0.0

    def receive(self, version: int, size: int, last: bool) -> None:
        seconds = self.take.per_byte * size + (self.take.fixed if last else 0.0)
        self.cpu_seconds += seconds
        done = self.core.take(self.clock.now, seconds)
        if last:
            self.clock.at(done, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        self.have = version
        self.taken(version)
        self.clock.at(self.clock.now + self.setting.latency_seconds, lambda: self.upstream.poll(self))


def layers_of(setting: Setting) -> list[int]:
    """Relays in each layer, the one next to the collectors first."""
    layers, readers = [], setting.collectors
    for _ in range(setting.depth):
        readers = -(-readers // setting.fan_out)
        layers.append(readers)
    return layers


def simulate(setting: Setting, costs: Costs) -> Outcome:
    """Play a setting; the same setting gives the same outcome."""
    clock, outcome = _Clock(), Outcome()
    shared_by_servers, shared_by_collectors = _Line(), _Line()

    def server_core() -> _Line:
        return shared_by_servers if setting.servers_share_a_core else _Line()

    endpoint = _Server(clock, setting, server_core(), costs.endpoint_send)
    relays: list[tuple[_Reader, _Server]] = []
    above = [endpoint]
    for count in reversed(layers_of(setting)):
        servers = []
        for number in range(count):
            core = server_core()
            server = _Server(clock, setting, core, costs.relay_send)
            reader = _Reader(clock, setting, above[number % len(above)], core, costs.relay_take, server.serve)
            relays.append((reader, server))
            servers.append(server)
        above = servers
    published: dict[int, float] = {}

    def applied(version: int) -> None:
        outcome.delays.append(clock.now - published[version])

    collectors = [
        _Reader(
            clock,
            setting,
            above[number % len(above)],
            shared_by_collectors if setting.collectors_share_a_core else _Line(),
            costs.collector_take,
            applied,
        )
        for number in range(setting.collectors)
    ]
    for reader in [*(reader for reader, _ in relays), *collectors]:
        reader.upstream.poll(reader)

    def publish(version: int) -> None:
        published[version] = clock.now
        done = endpoint.work(costs.publish.of(setting.snapshot_bytes))
        clock.at(done + costs.publish_wait_seconds, lambda: endpoint.serve(version))

    for number in range(setting.snapshots):
        version = number + 1
        clock.at(number * setting.publish_seconds, lambda version=version: publish(version))  # type: ignore[misc]
    clock.run()
    # A run that cannot keep up ends later than the last publication.
    seconds = max(clock.now, setting.snapshots * setting.publish_seconds)
    outcome.endpoint_cpu_share = endpoint.cpu_seconds / seconds
    outcome.endpoint_bytes_per_second = endpoint.sent_bytes / seconds
    outcome.relays = len(relays)
    outcome.relay_cpu_share = max((r.cpu_seconds + s.cpu_seconds for r, s in relays), default=0.0) / seconds
    outcome.skipped_share = 1 - len(outcome.delays) / (setting.snapshots * setting.collectors)
    return outcome
