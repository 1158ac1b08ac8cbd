import socket

import pytest

from paceline.errors import PortTakenError
from paceline.local import launcher


def test_a_port_that_is_chosen_for_later_is_none_that_somebody_is_given_by_chance() -> None:
    chosen = [launcher._free_address().rpartition(":") for _ in range(50)]
    assert {host for host, _, _ in chosen} == {"127.0.0.1"}
    for _ in range(50):
        with socket.create_server(("127.0.0.1", 0)) as given:
            assert given.getsockname()[1] > max(int(port) for _, _, port in chosen)


def test_a_port_that_is_taken_is_passed_over(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        monkeypatch.setattr(launcher, "_PORTS", range(taken, taken + 1))
        with pytest.raises(PortTakenError, match=f"{taken}"):
            launcher._free_address()
