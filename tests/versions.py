"""What older versions of torch lack."""

from __future__ import annotations

import pytest
import torch

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
