"""When threads that wait for one another go to sleep, and when they stop doing so."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from selective_compile.cores import IntraOpThreads
from selective_compile.shared_cores import CALM, WINDOW, SharedCores, SleepingTeam, waits_for_cores


class Machine:
    """Its clock, and threads that wait for cores for a share of the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits = {"1": 5, "2": 7}
        self.looks = 0

    def seen(self) -> dict[str, int]:
        self.looks += 1
        return dict(self.waits)

    def goes_on(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.waits["2"] += int(seconds * share * 1e9)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def cores(machine: Machine) -> SharedCores:
    return SharedCores(clock=lambda: machine.now, waits=machine.seen)


def steps(cores: SharedCores, machine: Machine, seconds: float, share: float) -> None:
    for _ in range(round(seconds / 0.01)):
        machine.goes_on(0.01, share)
        cores.look()


def test_one_window_with_other_work_is_enough_and_one_look_a_window(cores: SharedCores, machine: Machine) -> None:
    steps(cores, machine, 4, 0.02)
    assert not cores.shared and machine.looks <= 4 / WINDOW + 1
    steps(cores, machine, 2 * WINDOW + 0.02, 0.5)
    assert cores.shared


def test_it_ends_after_some_calm_windows_and_not_between_two_bursts(cores: SharedCores, machine: Machine) -> None:
    steps(cores, machine, 2, 0.5)
    for _ in range(3):
        steps(cores, machine, (CALM - 2) * WINDOW, 0.0)
        steps(cores, machine, WINDOW, 0.3)  # more than of threads that are alone, less than of shared cores
        assert cores.shared
    steps(cores, machine, (CALM + 2) * WINDOW, 0.0)
    assert not cores.shared


def test_a_few_waits_of_a_quiet_machine_change_nothing(cores: SharedCores, machine: Machine) -> None:
    steps(cores, machine, 2 * WINDOW, 0.0)
    steps(cores, machine, WINDOW, 0.12)  # as found between two processes of a benchmark that take turns
    assert not cores.shared


def test_a_pause_without_steps_tells_nothing(cores: SharedCores, machine: Machine) -> None:
    steps(cores, machine, 1, 0.0)
    machine.goes_on(3600, 0.5)
    cores.look()
    assert not cores.shared


def test_threads_that_come_and_go_do_not_count_for_what_they_waited_before(
    cores: SharedCores, machine: Machine
) -> None:
    steps(cores, machine, 1, 0.0)
    machine.waits = {"2": machine.waits["2"], "3": 10**12}
    steps(cores, machine, 1, 0.0)
    assert not cores.shared


def test_where_nothing_is_known_nothing_is_done(machine: Machine) -> None:
    cores = SharedCores(clock=lambda: machine.now, waits=dict)
    steps(cores, machine, 3, 0.9)
    assert not cores.shared


def test_a_sleeping_team_goes_with_its_owner_and_takes_no_time() -> None:
    # Asked of its own thread alone: where the machine is busy, engines of other tests may have teams that sleep, too.
    team = SleepingTeam()
    thread = team.thread
    assert thread in threading.enumerate() and thread.daemon
    time.sleep(0.2)
    begin = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - begin < 0.1
    team.end()
    thread.join(10)
    assert not thread.is_alive()
    team = SleepingTeam()
    thread = team.thread
    del team
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_s_threads_look_only_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(SharedCores, "look", lambda self: looks.append(1))
    with IntraOpThreads(1, available=2):
        pass
    assert not looks
    with IntraOpThreads(2, available=2):
        pass
    assert len(looks) == 1


def test_what_the_system_tells() -> None:
    first = waits_for_cores()
    if not first:
        pytest.skip("the system does not tell how long threads wait for cores")
    again = waits_for_cores()
    assert all(again[task] >= waited >= 0 for task, waited in first.items() if task in again)
