"""How `make test` shares the tests among its processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def scheduling() -> ModuleType:
    pytest.importorskip("xdist")
    spec = importlib.util.spec_from_file_location("scheduling", Path(__file__).with_name("scheduling.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_named_is_there(repo: Path, scheduling: ModuleType) -> None:
    for beginning in scheduling.TOGETHER:
        assert list(repo.glob(f"{beginning}*")), beginning
    for scope in scheduling.SECONDS:
        assert scope in scheduling.TOGETHER.values() or (repo / scope).is_file(), scope


class Node:
    """A worker that only takes tests."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway, self.given = SimpleNamespace(id=name), list[int]()

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_the_longest_begin_and_groups_stay_whole(
    scheduling: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "SECONDS", {"smollm2": 9, "tests/slow.py": 5})
    tests = [
        "tests/many.py::a", "tests/many.py::b", "tests/many.py::c", "tests/e2e/one.py::a",
        "tests/slow.py::a", "tests/few.py::a", "tests/e2e/two.py::a",
    ]  # fmt: skip
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=True), getvalue=lambda name: ["popen"], hook=None
    )
    scheduler = scheduling.Scheduling(config)
    node = Node("gw0")
    scheduler.add_node(node)
    scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    while scheduler.workqueue:
        units = scheduler.assigned_work[node].values()
        waiting = [test for unit in units for test, done in unit.items() if not done]
        scheduler.mark_test_complete(node, tests.index(waiting[0]))
    assert [tests[i].split("::")[0] for i in node.given] == [
        "tests/e2e/one.py", "tests/e2e/two.py", "tests/slow.py", "tests/many.py", "tests/many.py",
        "tests/many.py", "tests/few.py",
    ]  # fmt: skip
