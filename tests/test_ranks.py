"""The processes of tests of parallel code: results, exceptions, and ranks that hang."""

import os

import pytest
import torch
from torch import distributed as dist

from support.ranks import RankError


def add(value):
    total = torch.full((1,), float(value + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total, os.getpid()


def raise_on_one():
    if dist.get_rank() == 1:
        raise FileNotFoundError("no weights")
    return "done"


def hang():
    if dist.get_rank() == 0:
        dist.barrier()


def test_results_come_by_rank_from_processes_that_stay(ranks):
    results = ranks(2)(add, 5)
    assert [(rank, total.item()) for rank, total, _ in results] == [(0, 11.0), (1, 11.0)]
    assert [pid for *_, pid in ranks(2)(add, 0)] == [pid for *_, pid in results]


def test_an_exception_is_raised_as_it_is(ranks):
    with pytest.raises(FileNotFoundError, match="no weights") as caught:
        ranks(2)(raise_on_one)
    assert "rank 1" in caught.value.__notes__[0]
    assert ranks(2).outcomes(raise_on_one)[0] == "done"


def test_a_rank_that_hangs_is_ended(ranks):
    group = ranks(2)
    with pytest.raises(RankError, match="no answer within 2 s"):
        group(hang, timeout=2)
    assert not group.alive
    assert len(ranks(2)(add, 0)) == 2
