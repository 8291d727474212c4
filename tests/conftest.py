"""What holds for every test: memory that was allocated and not written reads as NaN, and one thread for each worker."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """`torch.empty` and its relatives come filled with NaN (integers: their maximum), so that nothing can rest on what was there before."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
