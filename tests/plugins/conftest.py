from __future__ import annotations

import pytest
import torch

from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.native import NativeLibrary, compile_native, detect_host, load_native


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """On any machine, and however many the other workers use: work that is split is what is to be tested."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def host() -> HostCpu:
    return detect_host()


@pytest.fixture(scope="session")
def kernels(two_threads: None, host: HostCpu) -> NativeLibrary:
    return load_native(compile_native(host.level))
