from __future__ import annotations

import pytest
import torch

from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.native import NativeLibrary, compile_native, detect_host, load_native


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="session")
def host() -> HostCpu:
    return detect_host()


@pytest.fixture(scope="session")
def kernels(two_threads: None, host: HostCpu) -> NativeLibrary:
    return load_native(compile_native(host.level))
