import dataclasses
import hashlib
import json
import math
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from paceline.actors import Actor, ActorInfo, ActorSemantics, build_actor, squashed_gaussian_semantics
from paceline.errors import ActorSemanticsError, InvalidInputError, NonFiniteError, SnapshotError
from paceline.identity import PolicyIdentity
from paceline.rpc.wire import snapshot_header_from_wire, snapshot_header_to_wire
from paceline.snapshot import SnapshotHeader, StagedActor, TensorDescription, make_header, pack_state, verify
from paceline.v1 import parameters_pb2

SEMANTICS = squashed_gaussian_semantics(
    3, hidden=(8, 8), action_low=[-2.0, -1.0], action_high=[2.0, 3.0], normalise_observation=True
)


class Tensors(Actor):
    """An actor that is nothing but its buffers."""

    action_transform_id = "none"
    semantics = ActorSemantics(1, "tensors", "here:Tensors", {}, 1, 1, "none")

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(f"the_{name}", tensor)  # "float" and the like are methods of a module

    def forward(
        self, observation: Tensor, training: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, ActorInfo]:
        raise NotImplementedError

    def get_mean_and_std(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def explore(
        self, observation: Tensor, deterministic: bool, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def as_export_module(self) -> nn.Module:
        raise NotImplementedError


def header_of(actor: Actor, payload: bytes, version: int = 1) -> SnapshotHeader:
    return make_header(
        actor,
        payload,
        run_id="run",
        identity=PolicyIdentity(1, version),
        learner_step=10,
        environment_step_count=20,
        published_at=1234.5,
    )


def resealed(header: SnapshotHeader, payload: bytes, **changes: Any) -> SnapshotHeader:
    """The header of another payload, with a right length and hash, so that only what it holds is wrong."""
    digest = hashlib.sha256(payload).digest()
    return dataclasses.replace(header, payload_bytes=len(payload), payload_sha256=digest, **changes)


def transfer(source: Actor, target: Actor) -> None:
    payload = pack_state(source)
    staged = StagedActor(target)
    staged.stage(header_of(source, payload), payload)
    assert staged.apply() is not None


def learner_actor() -> Actor:
    torch.manual_seed(1)
    actor = build_actor(SEMANTICS)
    actor.update_statistics(torch.randn(500, 3) * 5 + 50)
    return actor


def test_every_type_and_shape_arrives_bit_equal() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "float32": torch.randn(3, 4, generator=generator),
        "float64": torch.randn(2, generator=generator, dtype=torch.float64),
        "float16": torch.randn(5, generator=generator).half(),
        "bfloat16": torch.randn(5, generator=generator).bfloat16(),
        "int64": torch.tensor([-(2**62), 2**62]),
        "uint8": torch.arange(256, dtype=torch.uint8).view(16, 16),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(math.pi),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    copy = Tensors({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    transfer(Tensors(tensors), copy)
    received = dict(copy.named_tensors())
    for name, tensor in tensors.items():
        assert received[f"the_{name}"].dtype == tensor.dtype
        assert received[f"the_{name}"].shape == tensor.shape
        assert torch.equal(received[f"the_{name}"], tensor), name


@pytest.mark.parametrize("mebibytes", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_a_tensor_larger_than_any_message_arrives_bit_equal(mebibytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(mebibytes << 18, generator=generator)
    copy = Tensors({"big": torch.zeros_like(big), "small": torch.zeros(3)})
    transfer(Tensors({"big": big, "small": torch.arange(3.0)}), copy)
    received = dict(copy.named_tensors())
    assert torch.equal(received["the_big"], big)
    assert received["the_small"].tolist() == [0, 1, 2]


def test_a_replica_acts_as_the_learner_does_normaliser_and_all() -> None:
    actor, replica = learner_actor(), build_actor(SEMANTICS)
    observation = torch.randn(20, 3) * 5 + 50
    transfer(actor, replica)
    mine, theirs = (each.explore(observation, True)[0] for each in (actor, replica))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    before = {name: tensor.clone() for name, tensor in replica.named_tensors()}
    for _ in range(1000):
        replica.explore(observation, False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in replica.named_tensors())


def test_another_process_acts_alike_from_the_bytes_alone(tmp_path: Path) -> None:
    actor = learner_actor()
    payload = pack_state(actor)
    observation = torch.randn(4, 3) * 5 + 50
    (tmp_path / "payload").write_bytes(payload)
    (tmp_path / "semantics").write_text(actor.semantics.to_json())
    (tmp_path / "observation").write_text(json.dumps(observation.tolist()))
    program = """
import json, pathlib, sys, torch
from paceline.actors import ActorSemantics, build_actor
from paceline.identity import PolicyIdentity
from paceline.snapshot import StagedActor, make_header
folder = pathlib.Path(sys.argv[1])
actor = build_actor(ActorSemantics.from_json((folder / "semantics").read_text()))
payload, staged = (folder / "payload").read_bytes(), StagedActor(actor)
staged.stage(make_header(actor, payload, run_id="r", identity=PolicyIdentity(1, 1), learner_step=0,
                         environment_step_count=0, published_at=0.0), payload)
staged.apply()
print(json.dumps(actor.explore(torch.tensor(json.loads((folder / "observation").read_text())), True)[0].tolist()))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    torch.testing.assert_close(torch.tensor(answer), actor.explore(observation, True)[0], rtol=0, atol=1e-6)


def test_the_bytes_are_a_copy_that_later_updates_do_not_reach() -> None:
    actor = learner_actor()
    payload = pack_state(actor)
    digest = hashlib.sha256(payload).digest()
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(1)
    assert hashlib.sha256(payload).digest() == digest


def test_weights_that_are_not_finite_are_never_packed() -> None:
    actor = learner_actor()
    dict(actor.named_buffers())["normaliser.mean"][1] = math.nan
    with pytest.raises(NonFiniteError, match=r"'normaliser\.mean'"):
        pack_state(actor)


def flip_a_byte(header: SnapshotHeader, payload: bytes) -> tuple[SnapshotHeader, bytes]:
    middle = len(payload) // 2
    return header, payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]


def cut_short(header: SnapshotHeader, payload: bytes) -> tuple[SnapshotHeader, bytes]:
    return header, payload[:-1]


def change_state(change: Callable[[dict[str, Tensor]], None], *, honest: bool) -> Any:
    def spoil(header: SnapshotHeader, payload: bytes) -> tuple[SnapshotHeader, bytes]:
        state = load(payload)
        change(state)
        changed, tensors = save(state), header.tensors
        if honest:  # the header tells of the change; otherwise it claims the actor's own tensors
            tensors = tuple(
                TensorDescription(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in state.items()
            )
        return resealed(header, changed, tensors=tensors), changed

    return spoil


def drop(state: dict[str, Tensor]) -> None:
    del state["head.bias"]


def add(state: dict[str, Tensor]) -> None:
    state["tail.bias"] = torch.zeros(1)


def transpose(state: dict[str, Tensor]) -> None:
    state["trunk.0.weight"] = state["trunk.0.weight"].T.contiguous()


def widen(state: dict[str, Tensor]) -> None:
    state["head.bias"] = state["head.bias"].double()


def poison(state: dict[str, Tensor]) -> None:
    state["head.bias"][0] = math.inf


def not_safetensors(header: SnapshotHeader, payload: bytes) -> tuple[SnapshotHeader, bytes]:
    garbage = b"\xff" * len(payload)
    return resealed(header, garbage), garbage


REFUSALS = {
    "one flipped byte": (flip_a_byte, "SHA-256"),
    "wrong length": (cut_short, "bytes: expected"),
    "not safetensors": (not_safetensors, "not safetensors"),
    **{
        f"{change.__name__}, {'told' if honest else 'hidden'}": (change_state(change, honest=honest), words)
        for change, words in (
            (drop, "head.bias"),
            (add, "tail.bias"),
            (transpose, "trunk.0.weight"),
            (widen, "float64"),
        )
        for honest in (True, False)
    },
    "an infinity": (change_state(poison, honest=False), "infinity"),
}


@pytest.mark.parametrize(("spoil", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_damaged_or_foreign_snapshot_is_refused_and_the_live_actor_stays(spoil: Any, words: str) -> None:
    actor, replica = learner_actor(), build_actor(SEMANTICS)
    staged = StagedActor(replica)
    before = {name: tensor.clone() for name, tensor in replica.named_tensors()}
    payload = pack_state(actor)
    header, spoiled = spoil(header_of(actor, payload), payload)
    with pytest.raises(SnapshotError, match=words):
        staged.stage(header, spoiled)
    assert staged.apply() is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in replica.named_tensors())


@pytest.mark.parametrize("name", [*(field.name for field in dataclasses.fields(ActorSemantics)), "missing", "null"])
def test_another_meaning_is_refused_before_a_weight_is_touched(name: str) -> None:
    actor, replica = learner_actor(), build_actor(SEMANTICS)
    staged = StagedActor(replica)
    before = {key: tensor.clone() for key, tensor in replica.named_tensors()}
    payload = pack_state(actor)
    record = json.loads(SEMANTICS.to_json())
    if name in record:
        value = record[name]
        record[name] = value + 1 if isinstance(value, int) else {**value, "hidden": [9]} if name == "kwargs" else "x"
    text = {"missing": "", "null": "null"}.get(name, json.dumps(record))
    header = dataclasses.replace(header_of(actor, payload), actor_semantics_json=text)
    with pytest.raises(ActorSemanticsError, match="are missing" if name in ("missing", "null") else name):
        staged.stage(header, payload)
    assert staged.apply() is None
    assert all(torch.equal(tensor, before[key]) for key, tensor in replica.named_tensors())


def test_a_refused_snapshot_leaves_the_one_that_was_staged_before() -> None:
    actor, replica = learner_actor(), build_actor(SEMANTICS)
    staged = StagedActor(replica)
    payload = pack_state(actor)
    staged.stage(header_of(actor, payload, version=3), payload)
    with pytest.raises(SnapshotError):
        staged.stage(header_of(actor, payload, version=4), payload[:-1])
    applied = staged.apply()
    assert applied is not None
    assert applied.identity == PolicyIdentity(1, 3)
    assert staged.apply() is None


def test_staging_while_acting_never_shows_half_a_snapshot() -> None:
    source = Tensors({"a": torch.zeros(50_000), "b": torch.zeros(50_000)})
    replica = Tensors({"a": torch.zeros(50_000), "b": torch.zeros(50_000)})
    staged, done = StagedActor(replica), threading.Event()

    def publish() -> None:
        for version in range(1, 60):
            for _, tensor in source.named_tensors():
                tensor.fill_(version)
            payload = pack_state(source)
            staged.stage(header_of(source, payload, version), payload)
        done.set()

    publisher = threading.Thread(target=publish)
    publisher.start()
    version = 0
    while True:
        finished = done.is_set()
        header = staged.apply()
        if header is not None:
            assert header.identity.version > version
            version = header.identity.version
            assert all(bool((tensor == version).all()) for _, tensor in replica.named_tensors())
        elif finished:
            break
    publisher.join()
    assert version == 59


class Marker:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickled_bytes_are_refused_and_never_run(tmp_path: Path) -> None:
    actor = learner_actor()
    payload = pickle.dumps(Marker(tmp_path / "marker")).ljust(len(pack_state(actor)), b"\0")
    header = resealed(header_of(actor, pack_state(actor)), payload)
    with pytest.raises(SnapshotError, match="not safetensors"):
        StagedActor(build_actor(SEMANTICS)).stage(header, payload)
    assert not (tmp_path / "marker").exists()


def test_a_header_survives_the_wire() -> None:
    actor = learner_actor()
    payload = pack_state(actor)
    header = header_of(actor, payload)
    message = snapshot_header_to_wire(header, 3, parameters_pb2.RUN_STATE_RUNNING)
    assert message.chunk_count == 3
    assert snapshot_header_from_wire(parameters_pb2.SnapshotHeader.FromString(message.SerializeToString())) == header
    verify(header, payload)


def claim_elements(message: parameters_pb2.SnapshotHeader) -> None:
    message.tensors[0].shape[:] = [10**12]
    message.payload_bytes = 4 * 10**12 + 1_000


def claim_bytes(message: parameters_pb2.SnapshotHeader) -> None:
    message.payload_bytes = 10**12


def claim_tensors(message: parameters_pb2.SnapshotHeader) -> None:
    for _ in range(70_000):
        message.tensors.add(name="x", data_type=1)


def claim_a_type(message: parameters_pb2.SnapshotHeader) -> None:
    message.tensors[0].data_type = 99  # type: ignore[assignment]


def claim_a_negative_size(message: parameters_pb2.SnapshotHeader) -> None:
    message.tensors[0].shape[:] = [-1, -5]


def claim_no_chunks(message: parameters_pb2.SnapshotHeader) -> None:
    message.chunk_count = 0


def claim_no_identity(message: parameters_pb2.SnapshotHeader) -> None:
    message.ClearField("identity")


def claim_a_short_hash(message: parameters_pb2.SnapshotHeader) -> None:
    message.payload_sha256 = b"short"


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (claim_elements, "claims 4000000001000 bytes"),
        (claim_bytes, "claims 1000000000000 bytes"),
        (claim_tensors, "tensors: expected 1 to 65536"),
        (claim_a_type, "dtype '99'"),
        (claim_a_negative_size, "none negative"),
        (claim_no_chunks, "0 chunks"),
        (claim_no_identity, "incarnation >= 1"),
        (claim_a_short_hash, "5 bytes: expected 32"),
    ],
)
def test_a_header_with_false_claims_is_refused_before_anything_is_allocated(claim: Any, words: str) -> None:
    actor = learner_actor()
    message = snapshot_header_to_wire(header_of(actor, pack_state(actor)), 1, parameters_pb2.RUN_STATE_RUNNING)
    claim(message)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInputError, match=words):
        snapshot_header_from_wire(message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_the_module_that_serves_snapshots_needs_no_torch() -> None:
    program = "import sys, paceline.snapshot, paceline.rpc.wire; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
