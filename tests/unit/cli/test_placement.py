"""Cores of the workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.placement import cores_text, split_cores, worker_cores


@given(st.sets(st.integers(0, 200), min_size=1, max_size=64), st.integers(1, 64))
def test_enough_cores_are_shared_by_nobody(cores: set[int], num_workers: int):
    """With enough cores each worker has its own, all are used and no worker has two more than another."""
    parts = split_cores(sorted(cores), num_workers)
    assert len(parts) == num_workers
    assert {core for part in parts for core in part} <= cores
    if len(cores) >= num_workers:
        assert sorted(core for part in parts for core in part) == sorted(cores)
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_few_cores_go_round():
    """Three workers on two cores: one core each, one of them shared."""
    assert split_cores([4, 6], 3) == [(4,), (6,), (4,)]


def test_one_each_on_the_smallest_machine():
    """Two cores, one prefill and one decode worker: one core each."""
    assert split_cores([0, 1], 2) == [(0,), (1,)]


@pytest.mark.parametrize(
    ("cores", "text"), [((0,), "0"), ((0, 1, 2, 3), "0-3"), ((8, 0, 1), "0-1,8"), ((1, 3, 5), "1,3,5")]
)
def test_cores_are_written_as_the_kernel_does(cores: tuple[int, ...], text: str):
    """Runs become ranges."""
    assert cores_text(cores) == text


@pytest.mark.parametrize(("num_cores", "num_left"), [(1, 0), (2, 0), (7, 0), (8, 1), (15, 1), (16, 2), (64, 8)])
def test_workers_leave_one_core_in_eight_to_the_services(num_cores: int, num_left: int):
    """On a small machine none: the services then run beside the workers."""
    cores = range(3, 3 + num_cores)
    assert worker_cores(cores) == tuple(cores[: num_cores - num_left])
