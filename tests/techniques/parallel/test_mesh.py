"""Degrees of `Parallel`, and the process groups of the mesh."""

import pytest
import torch
import torch.distributed as dist

import tritium
from tritium import Parallel
from tritium.errors import ConfigError, PipelineError
from tritium.techniques.parallel import mesh


class TestConfig:
    @pytest.mark.parametrize(
        "degrees", [{"ulysses": 0}, {"cfg": -1}, {"ring": 1.5}, {"gather": True}, {"vae": "all"}, {"ulises": 2}]
    )
    def test_bad_values_raise_in_the_plan(self, degrees):
        with pytest.raises(ConfigError):
            tritium.Plan(parallel=degrees)

    def test_one_named_axis_sets_the_others_to_one(self):
        assert Parallel().is_auto
        assert not Parallel(ulysses=1).is_auto
        assert Parallel(cfg=2, ulysses=4).degrees == {
            **dict.fromkeys(("ring", "gather", "experts", "tensor"), 1),
            "cfg": 2,
            "ulysses": 4,
        }

    def test_a_product_other_than_the_world_names_the_next_one(self):
        with pytest.raises(ConfigError, match="uses 6 ranks and the world has 8; use ulysses=4, or start 6 ranks"):
            mesh.check(Parallel(cfg=2, ulysses=3), 8)
        with pytest.raises(ConfigError, match="vae=3 does not divide"):
            mesh.check(Parallel(ulysses=8, vae=3), 8)

    def test_without_ranks_nothing_changes(self):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        with pytest.raises(PipelineError, match="no process group; start it with torchrun"):
            tritium.optimize(model, tritium.Plan(parallel=Parallel(ulysses=2), components={"model": "eager"}))
        assert "_compiled_call_impl" not in model.__dict__


def axes():
    whole = mesh.mesh_of(Parallel(cfg=2, ulysses=2), torch.device("cpu"))
    rank = torch.tensor([dist.get_rank()])
    gathered = {}
    for name in ("cfg", "ulysses"):
        axis = whole[name]
        parts = [torch.empty_like(rank) for _ in range(axis.size)]
        dist.all_gather(parts, rank, group=axis.group)
        assert [int(part) for part in parts] == axis.ranks
        assert axis.ranks[axis.rank] == dist.get_rank()
        gathered[name] = axis.ranks
    assert whole["ring"].size == 1
    assert mesh.mesh_of(Parallel(cfg=2, ulysses=2), torch.device("cpu")) is whole
    return gathered


def renewed():
    """Return the names of an axis' group before and after the groups were destroyed."""
    axis = mesh.mesh_of(Parallel(cfg=2), torch.device("cpu"))["cfg"]
    names = [axis.group.group_name]
    mesh.renew()
    names.append(axis.group.group_name)
    for group in (axis.group, dist.group.WORLD):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert int(total) == 2
    return names


def test_groups_are_created_again_and_the_world_stays(ranks):
    first, second = ranks(2)(renewed)
    assert first == second
    assert first[0] != first[1]


def test_ranks_of_inner_axes_are_neighbours(ranks):
    found = ranks(4)(axes)
    assert [one["ulysses"] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one["cfg"] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
