import pytest
import torch

from trainers.optimizer_states import regroup

ROWS = 3


@pytest.mark.parametrize(("saved", "wanted"), [(1, 4), (2, 4), (4, 2), (4, 1), (2, 3), (3, 2)])
def test_regrouped_states_are_means_over_the_columns_they_cover(saved, wanted):
    columns = 12
    generator = torch.Generator().manual_seed(0)
    states = torch.rand(saved, ROWS, generator=generator)
    by_column = states.repeat_interleave(columns // saved, dim=0)  # [columns, rows]
    expected = by_column.view(wanted, columns // wanted, ROWS).mean(dim=1)
    torch.testing.assert_close(regroup(states.reshape(-1), ROWS, wanted).view(wanted, ROWS), expected)
