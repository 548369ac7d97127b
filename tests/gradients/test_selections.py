"""What is computed of positions that were selected by value is followed, and nothing else is."""

import pytest
import torch
from torch import Tensor

from dp_grape_hf.gradients.selections import Selections

VALUES = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 4.0]])

REACHED = {
    "a boolean mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "where": lambda x: torch.where(x > 0)[1],
    "computed from": lambda x: x[x > 0].exp() + 1,
    "a view": lambda x: x[x > 0][None].T,
    "indexed by": lambda x: x.flatten()[(x.flatten() > 0).nonzero()[:, 0]],
    "in sparse form": lambda x: (x[x > 0][None].to_sparse() * 2).to_dense(),
    "written into": lambda x: torch.zeros(5).index_add_(0, torch.arange(4), x[x > 0]),
}
NOT_REACHED = {
    "sorted": lambda x: x.gather(1, x.argsort(1)),
    "by number": lambda x: x[torch.tensor([1, 0])],
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "filled": lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
}


@pytest.mark.parametrize("how", REACHED)
def test_what_comes_of_a_selection_is_known(how):
    x = VALUES.clone()
    with Selections() as selections:
        y = x + 1
        found = REACHED[how](x)
        assert selections.reach(found)
        assert not selections.reach(x)
        assert not selections.reach(y)
        assert not selections.reach(torch.zeros(4))


@pytest.mark.parametrize("how", NOT_REACHED)
def test_what_has_a_known_number_of_positions_is_no_selection(how):
    with Selections() as selections:
        assert not selections.reach(NOT_REACHED[how](VALUES))


def test_a_view_that_is_written_into_makes_its_base_known():
    with Selections() as selections:
        base = torch.zeros(2, 4)
        base[0].copy_(VALUES[VALUES > 0])
        assert selections.reach(base[1])


@pytest.mark.parametrize(
    "read",
    [
        *(Tensor.tolist, Tensor.numpy, Tensor.size, len, lambda x: x.shape[0]),
        *(list, torch.numel, Tensor.nelement),
        *(lambda x: x.sum().item(), lambda x: bool((x > 0).any())),
    ],
)
def test_what_is_read_from_a_selection_may_reach_anything(read):
    with Selections() as selections:
        read(VALUES)
        assert not selections.reach(VALUES)
        read(VALUES[VALUES > 0])
        assert selections.reach(VALUES)


def test_reused_memory_is_not_taken_for_a_selection():
    with Selections() as selections:
        for _ in range(100):
            assert not selections.reach(torch.zeros(4))
            VALUES[VALUES > 0].exp()
