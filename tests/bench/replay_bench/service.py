"""The whole service of one workload: durable inserts, samples, both at once, and their price in CPU time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from replay_bench.bare import serve_bare, serve_prototype
from replay_bench.clients import BareReader, ProductSampler, ProductWriter, PrototypeSampler, PrototypeWriter
from replay_bench.peers import Peers, peer_versions
from replay_bench.processes import CpuMeter, Remote, ServerProcess, free_address
from replay_bench.product import serve_product, serve_unrecorded
from replay_bench.recovery import measure_recovery
from replay_bench.rounds import Extent, Figures, Moved, Turn, take_turns
from replay_bench.runs import PRIORITISED, TABLE
from replay_bench.stores import Store
from replay_bench.workloads import LARGE, Workload

BATCH_ROWS = 8192
SMALL_BATCH_ROWS = 256
SHORT_SHARE = 0.5
"""Of a turn's seconds, for what is steady: transports that do nothing, and peers within one process."""


class ServiceSuite:
    """Servers and clients of one workload, all of them up until `stack` ends, and the turns that they take."""

    def __init__(self, stack: ExitStack, workload: Workload, folder: Path, redis_binary: Path | None) -> None:
        self._workload = workload
        self._stores = [
            Store(stack, folder / f"{workload.name}-{name}", redis_binary) for name in ("product", "prototype")
        ]
        self._redis, prototype_redis = self._stores
        product, unrecorded, prototype, grpc, tcp = (free_address() for _ in range(5))
        tables = (TABLE, PRIORITISED) if workload.name == "w2" else (TABLE,)
        self._product = ServerProcess(stack, serve_product, self._redis.url, product, workload.ring_rows, tables)
        ServerProcess(stack, serve_prototype, prototype_redis.url, prototype, workload)
        self._writers = {table: Remote(stack, ProductWriter, product, workload, table) for table in tables}
        self._prototype_writer = Remote(stack, PrototypeWriter, prototype, workload)
        self._prototype_sampler = Remote(stack, PrototypeSampler, prototype, workload)
        self._samplers = {table: Remote(stack, ProductSampler, product, workload, table) for table in tables}
        if workload.name in LARGE:
            self._unrecorded = ServerProcess(stack, serve_unrecorded, unrecorded, workload.ring_rows)
            self._unrecorded_writer = Remote(stack, ProductWriter, unrecorded, workload)
            self._bare = ServerProcess(stack, serve_bare, grpc, tcp)
            self._reader = Remote(stack, BareReader, tcp, grpc)
            self._peers = Remote(stack, Peers, workload, BATCH_ROWS)

    def measure(self, extent: Extent) -> Figures:
        """Figures of all turns."""
        self._fill()
        figures = take_turns(f"{self._workload.name} service", self._turns(), extent, self._settle)
        if self._workload.name not in LARGE:
            return figures
        self._writers[TABLE].call("fill", self._workload.ring_rows)  # in plain form, whichever form the last turn wrote
        for writer in self._writers.values():
            writer.call("close")
        self._product.stop()
        return figures | measure_recovery(self._workload, self._redis.url, extent)

    def _fill(self) -> None:
        """Fill every ring, so that each later block removes one."""
        writers = [*self._writers.values(), self._prototype_writer]
        others = [*self._samplers.values(), self._prototype_sampler]
        if self._workload.name in LARGE:
            writers.append(self._unrecorded_writer)
            others += [self._reader, self._peers]
        for writer in writers:
            writer.ready().start("fill", self._workload.ring_rows)
        for writer in writers:
            writer.result()
        if PRIORITISED in self._writers:
            self._writers[PRIORITISED].call("spread_priorities", self._workload.ring_rows)
        for other in others:
            other.ready()

    def _settle(self) -> None:
        for store in self._stores:
            store.settle()

    def _turns(self) -> list[Turn]:
        turns = [
            self._insert,
            self._insert_through_memory,
            self._insert_into_prototype,
            self._sample,
            self._sample_through_memory,
            self._sample_from_prototype,
            self._sampling(TABLE, SMALL_BATCH_ROWS),
            self._insert_and_sample,
        ]
        if self._workload.name in LARGE:
            turns += [self._read_tcp, self._read_grpc, self._write_grpc]
            turns += [self._inserting_unrecorded("unrecorded_insert", False)]
            turns += [self._inserting_unrecorded("shared_unrecorded_insert", True)]
            turns += [self._sampling_peer(name) for name, there in peer_versions().items() if there]
        if PRIORITISED in self._samplers:
            turns += [self._sampling(PRIORITISED, rows) for rows in (SMALL_BATCH_ROWS, BATCH_ROWS)]
        if self._workload.name == "w3":
            turns.append(self._insert_compact)
        return turns

    def _insert(self, seconds: float) -> dict[str, float]:
        return self._figures(insert_rows_per_s=self._writers[TABLE].call("insert", seconds).per_second)

    def _insert_through_memory(self, seconds: float) -> dict[str, float]:
        moved = self._writers[TABLE].call("insert", seconds, "plain", None, True)
        return self._figures(shared_insert_rows_per_s=moved.per_second)

    def _insert_compact(self, seconds: float) -> dict[str, float]:
        return self._figures(
            compact_insert_rows_per_s=self._writers[TABLE].call("insert", seconds, "compact").per_second
        )

    def _insert_into_prototype(self, seconds: float) -> dict[str, float]:
        return self._figures(prototype_insert_rows_per_s=self._prototype_writer.call("insert", seconds).per_second)

    def _inserting_unrecorded(self, name: str, shares: bool) -> Turn:
        def insert(seconds: float) -> dict[str, float]:
            with CpuMeter(self._unrecorded_writer, self._unrecorded) as meter:
                moved = self._unrecorded_writer.call("insert", seconds, "plain", None, shares)
            return self._figures(
                **{
                    f"{name}_rows_per_s": moved.per_second,
                    f"{name}_cpu_s_per_gb": meter.seconds / self._gigabytes(moved),
                }
            )

        return insert

    def _sample(self, seconds: float) -> dict[str, float]:
        return self._sample_large("sample", seconds, shares=False)

    def _sample_through_memory(self, seconds: float) -> dict[str, float]:
        return self._sample_large("shared_sample", seconds, shares=True)

    def _sample_large(self, name: str, seconds: float, *, shares: bool) -> dict[str, float]:
        with CpuMeter(self._samplers[TABLE], self._product) as meter:
            moved = self._samplers[TABLE].call("sample", BATCH_ROWS, seconds, shares)
        return self._figures(
            **{
                f"{name}_8192_rows_per_s": moved.per_second,
                f"{name}_8192_bytes_per_s": moved.per_second * self._workload.payload_bytes,
                f"{name}_cpu_s_per_gb": meter.seconds / self._gigabytes(moved),
            }
        )

    def _sample_from_prototype(self, seconds: float) -> dict[str, float]:
        moved = self._prototype_sampler.call("sample", BATCH_ROWS, seconds)
        return self._figures(
            prototype_sample_rows_per_s=moved.per_second,
            prototype_sample_bytes_per_s=moved.per_second * self._workload.payload_bytes,
        )

    def _sampling(self, table: str, batch_rows: int) -> Turn:
        name = "prioritised" if table == PRIORITISED else "sample"

        def sample(seconds: float) -> dict[str, float]:
            moved = self._samplers[table].call("sample", batch_rows, seconds)
            return self._figures(**{f"{name}_{batch_rows}_rows_per_s": moved.per_second})

        return sample

    def _insert_and_sample(self, seconds: float) -> dict[str, float]:
        self._writers[TABLE].start("insert", seconds)
        self._samplers[TABLE].start("sample", BATCH_ROWS, seconds)
        return self._figures(
            insert_beside_rows_per_s=self._writers[TABLE].result().per_second,
            sample_beside_rows_per_s=self._samplers[TABLE].result().per_second,
        )

    def _sampling_peer(self, name: str) -> Turn:
        def sample(seconds: float) -> dict[str, float]:
            moved = self._peers.call("sample", name, seconds * SHORT_SHARE)
            return self._figures(**{f"{name}_rows_per_s": moved.per_second})

        return sample

    def _read_tcp(self, seconds: float) -> dict[str, float]:
        return self._figures(tcp_bytes_per_s=self._reader.call("read_tcp", seconds * SHORT_SHARE).per_second)

    def _read_grpc(self, seconds: float) -> dict[str, float]:
        return self._stream_bytes("read_grpc", "grpc_down", seconds)

    def _write_grpc(self, seconds: float) -> dict[str, float]:
        return self._stream_bytes("write_grpc", "grpc_up", seconds)

    def _stream_bytes(self, method: str, name: str, seconds: float) -> dict[str, float]:
        with CpuMeter(self._reader, self._bare) as meter:
            moved = self._reader.call(method, seconds * SHORT_SHARE)
        return self._figures(
            **{
                f"{name}_bytes_per_s": moved.per_second,
                f"{name}_cpu_s_per_gb": meter.seconds / moved.amount * 1e9,
            }
        )

    def _gigabytes(self, moved: Moved) -> float:
        return moved.amount * self._workload.payload_bytes / 1e9

    def _figures(self, **values: float) -> dict[str, float]:
        return {f"{self._workload.name}.{name}": value for name, value in values.items()}


def measure_service(workload: Workload, extent: Extent, folder: Path, redis_binary: Path | None) -> Figures:
    """Figures of one workload."""
    with ExitStack() as stack:
        return ServiceSuite(stack, workload, folder, redis_binary).measure(extent)
