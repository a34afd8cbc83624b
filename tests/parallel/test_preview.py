"""What SIDCo fits to before a gradient is accumulated is what will be there then."""

import numpy as np
import pytest
import torch

from hvd_sparse.algorithms import Settings
from hvd_sparse.sampling import RUN
from hvd_sparse.torch.error_feedback import make_error_feedback
from hvd_sparse.units import Units


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("runs", [None, np.array([0, 2, 5])])
def test_a_preview_is_what_will_be_accumulated(runs, dtype):
    algorithm, n = Settings.sidco(None, density=0.01), 6 * RUN + 3
    feedback = make_error_feedback(algorithm, torch.zeros(n), torch.device("cpu"), 0.0)
    random = torch.Generator().manual_seed(0)
    feedback.residual.copy_(torch.randn(n, generator=random))
    feedback.residual[40] = 3e38
    gradient = torch.randn(n, generator=random).to(dtype)
    gradient[1], gradient[33] = float("nan"), float("inf")
    if dtype in (torch.float32, torch.bfloat16):
        gradient[40] = 3e38  # which the residual would not hold
    found = feedback.preview(gradient.view(3, 33), 0.5, runs)
    feedback.accumulate(gradient, 0.5, Units(1))
    whole = feedback.residual.numpy()
    expected = whole if runs is None else whole[: 6 * RUN].reshape(-1, RUN)[runs].reshape(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
