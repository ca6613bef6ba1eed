"""Which test files use the fixture `gpu` of the pytest plugin, found before they are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool.for_pytest.files import use_the_fixture

OWN = "import pytest\n@pytest.fixture\ndef gpu(): ...\n"


@pytest.mark.parametrize(
    ("source", "is_asking"),
    [
        ("def test_it(gpu): ...", True),
        ("async def test_it(gpu): ...", True),
        ("class TestIt:\n    def test_it(self, gpu): ...", True),
        ("@pytest.fixture\ndef model(gpu): ...", True),
        ("@pytest.mark.usefixtures('gpu')\ndef test_it(): ...", True),
        ("def test_it(request):\n    request.getfixturevalue('gpu')", True),
        ("pytestmark = pytest.mark.gpu_pool(count=2)", True),
        ("from pytest import mark\npytestmark = [mark.gpu_pool(count=2)]", True),
        ("def test_it(gpus): ...", False),
        ("def helper(gpu): ...\ndef test_it(): helper(1)", False),
        ("@pytest.mark.parametrize('gpu', [1])\ndef test_it(gpu): ...", False),
        ("def gpu_pool(*words): ...\ndef test_it(): gpu_pool('status')", False),
        ("def test_it(people): people.gpu_pool('status')", False),
        ("text = 'def test_it(gpu): ...'", False),
        ("def test_it(gpu: ...", False),
    ],
)
def test_a_file_that_asks(source: str, is_asking: bool, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(source)
    assert use_the_fixture([str(tmp_path)], tmp_path, ["test_*.py"]) is is_asking
    assert use_the_fixture([f"{tmp_path}/test_it.py::test_it"], tmp_path, ["test_*.py"]) is is_asking


def test_a_fixture_of_the_same_name_is_the_suite_s(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "deep"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text("def test_it(gpu): ...")
    assert use_the_fixture([str(folder)], tmp_path, ["test_*.py"])
    (tmp_path / "tests" / "conftest.py").write_text(OWN)
    assert not use_the_fixture([str(folder)], tmp_path, ["test_*.py"])
    (tmp_path / "tests" / "conftest.py").write_text("import pytest\npytest.fixture(name='gpu')(lambda: 1)\n")
    assert not use_the_fixture([str(folder)], tmp_path, ["test_*.py"])


def test_the_tests_of_this_project_use_no_gpu() -> None:
    """Each process that runs them would hold one, with the threads of a lease."""
    tests = Path(__file__).parents[1]
    assert not use_the_fixture([str(tests)], tests.parent, ["test_*.py"])
