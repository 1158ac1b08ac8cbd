"""The ledger: incarnations and versions never come twice, two learners exclude each other, damage is said."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from paceline.errors import ConflictError, InvalidInputError
from paceline.learner.ledger import EndpointLedger, Ledger


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "first-try"


def use(run_folder: Path, version: int = 7) -> None:
    """One learner's life: start, publish, end."""
    with Ledger.open(run_folder, resume=False) as ledger:
        endpoint = EndpointLedger.open(run_folder)
        endpoint.write_version(ledger.incarnation, version)
        endpoint.write_members({"collector": {0: 2, 3: 1}, "evaluator": {0: 1}})
        endpoint.close()


def test_a_fresh_run_begins_with_incarnation_one_and_no_version(run_folder: Path) -> None:
    with Ledger.open(run_folder, resume=False) as ledger:
        assert (ledger.incarnation, ledger.last_version) == (1, 0)


def test_a_resumed_run_goes_on_above_the_last_version_with_the_next_incarnation(run_folder: Path) -> None:
    use(run_folder, version=7)
    with Ledger.open(run_folder, resume=True) as ledger:
        assert (ledger.incarnation, ledger.last_version) == (2, 7)
        endpoint = EndpointLedger.open(run_folder)
        assert endpoint.last_version == 7
        assert endpoint.members == {"collector": {0: 2, 3: 1}, "evaluator": {0: 1}}
        endpoint.close()


def test_a_used_run_without_resume_is_refused_with_both_ways_out(run_folder: Path) -> None:
    use(run_folder)
    with pytest.raises(ConflictError, match=r"'first-try'.*--resume.*another run\.id"):
        Ledger.open(run_folder, resume=False)


def test_a_refused_start_leaves_the_run_free(run_folder: Path) -> None:
    use(run_folder)
    with pytest.raises(ConflictError):
        Ledger.open(run_folder, resume=False)
    Ledger.open(run_folder, resume=True).close()


def test_a_start_that_came_to_nothing_does_not_use_the_run_but_its_incarnation(run_folder: Path) -> None:
    Ledger.open(run_folder, resume=False).close()
    with Ledger.open(run_folder, resume=False) as ledger:
        assert ledger.incarnation == 2


def test_a_second_learner_of_one_run_is_refused(run_folder: Path) -> None:
    with Ledger.open(run_folder, resume=False), pytest.raises(ConflictError, match="another learner trains it now"):
        Ledger.open(run_folder, resume=True)


def test_a_second_endpoint_of_one_run_is_refused(run_folder: Path) -> None:
    endpoint = EndpointLedger.open(run_folder)
    with pytest.raises(ConflictError, match="another endpoint serves it now"):
        EndpointLedger.open(run_folder)
    endpoint.close()


def test_a_learner_waits_for_the_endpoint_of_the_one_before(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.learner.ledger.ENDPOINT_END_SECONDS", 0.05)
    endpoint = EndpointLedger.open(run_folder)
    with pytest.raises(ConflictError, match="the endpoint of an earlier learner is still running"):
        Ledger.open(run_folder, resume=False)
    endpoint.close()
    Ledger.open(run_folder, resume=False).close()


@pytest.mark.parametrize("version", [6, 7])
def test_a_version_that_is_not_above_the_last_one_is_refused(run_folder: Path, version: int) -> None:
    endpoint = EndpointLedger.open(run_folder)
    endpoint.write_version(1, 7)
    with pytest.raises(ConflictError, match=f"version {version} is published after version 7"):
        endpoint.write_version(2, version)
    endpoint.close()


def test_versions_of_any_size_are_read_back(run_folder: Path) -> None:
    for version in (1, 9_999, 2**62):
        endpoint = EndpointLedger.open(run_folder)
        endpoint.write_version(2**31 - 1, version)
        endpoint.close()
        with Ledger.open(run_folder, resume=True) as ledger:
            assert ledger.last_version == version


@pytest.mark.parametrize("name", ["incarnation.json", "version", "members.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other"])
def test_a_damaged_file_is_named(run_folder: Path, name: str, damage: str) -> None:
    use(run_folder)
    path = run_folder / "learner" / name
    data = path.read_bytes()
    digit = next(position for position, byte in enumerate(data) if chr(byte).isdigit())
    path.write_bytes(
        {
            "cut": data[: len(data.rstrip()) // 2],
            "empty": b"",
            "flipped": data[:digit] + (b"1" if data[digit : digit + 1] != b"1" else b"2") + data[digit + 1 :],
            "other": json.dumps([1, 2]).encode(),
        }[damage]
    )
    with pytest.raises(InvalidInputError, match=f"{name} is damaged"):
        Ledger.open(run_folder, resume=True)


def test_what_ended_by_a_number_that_is_not_finite_is_counted_over_all_incarnations(run_folder: Path) -> None:
    for count in range(2):
        with Ledger.open(run_folder, resume=True) as ledger:
            assert ledger.non_finite_count == count
            ledger.note_non_finite()
    with Ledger.open(run_folder, resume=True) as ledger:
        assert ledger.non_finite_count == 2


def test_a_folder_keeps_the_id_of_its_learner_and_no_two_have_the_same(run_folder: Path, tmp_path: Path) -> None:
    with Ledger.open(run_folder, resume=False) as ledger:
        first = ledger.learner_id
    with Ledger.open(run_folder, resume=True) as ledger:
        assert (ledger.learner_id, ledger.incarnation) == (first, 2)
    with Ledger.open(tmp_path / "other", resume=False) as ledger:
        assert ledger.learner_id != first


def test_a_folder_of_the_release_before_gets_an_id_and_goes_on_counting(run_folder: Path) -> None:
    Ledger.open(run_folder, resume=False).close()
    path = run_folder / "learner" / "incarnation.json"
    content = {"incarnation": 7}
    text = json.dumps(content)
    path.write_text(json.dumps({"content": content, "crc32": zlib.crc32(text.encode())}))
    with Ledger.open(run_folder, resume=True) as ledger:
        assert ledger.incarnation == 8
        made = ledger.learner_id
    with Ledger.open(run_folder, resume=True) as ledger:
        assert ledger.learner_id == made
