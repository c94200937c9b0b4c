"""The device check: it says so where there is no device, and its installation record is read."""

import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import torch

from ci import gpu_check
from ci.layout import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_says_so_and_succeeds():
    command = [sys.executable, str(ROOT / "ci" / "gpu_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0
    assert "no CUDA device" in done.stdout


@pytest.mark.parametrize("plugin", gpu_check.KERNELS)
def test_record_gives_version_and_entry_points(plugin: str, tmp_path: Path):
    gpu_check._metadata(plugin, tmp_path)
    [info] = tmp_path.iterdir()
    distribution = Distribution.at(info)
    assert distribution.metadata["Name"] == plugin.replace("_", "-")
    assert distribution.version
    assert (ROOT / plugin / gpu_check.KERNELS[plugin]).exists()
