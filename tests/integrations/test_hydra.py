"""The launcher of integrations/hydra, with Hydra itself: `make test-integrations`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.workers.conftest import Host

pytest.importorskip("hydra", reason="make test-integrations installs it")

APP = """
    import os, pathlib, signal, time

    import hydra
    from omegaconf import OmegaConf


    class Unsendable:
        def __reduce__(self):
            raise TypeError("not this one")


    @hydra.main(version_base=None, config_path=None)
    def main(config):
        what, gpu = config.get("what", "use"), os.environ["CUDA_VISIBLE_DEVICES"]
        folder = pathlib.Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
        (folder / "gpu").write_text(f"{gpu} {os.getpid()}")
        if what == "raise":
            raise ValueError("this rate diverges")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "unsendable":
            return Unsendable()
        time.sleep(config.get("seconds", 0))
        return float(config.seed)


    if __name__ == "__main__":
        main()
"""


class Project:
    def __init__(self, folder: Path, host: Host) -> None:
        self.folder, self.host = folder, host
        (folder / "train.py").write_text(textwrap.dedent(APP))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "train.py", "--multirun", "hydra/launcher=gpu_pool", "hydra.sweep.dir=out", *words]
        return subprocess.run(
            command, cwd=self.folder, env=self.host.environment, capture_output=True, text=True, timeout=50, check=False
        )

    def used(self) -> list[list[str]]:
        """By job: the GPU and the process."""
        return [path.read_text().split() for path in sorted((self.folder / "out").glob("*/gpu"))]


@pytest.fixture
def project(host: Host, tmp_path: Path) -> Project:
    return Project(tmp_path, host)


def test_each_job_of_a_multirun_has_a_gpu(project: Project) -> None:
    done = project.run("+seed=1,2,3,4", "+seconds=0.5", "hydra.launcher.max_workers=2")
    assert done.returncode == 0, done.stderr
    used = project.used()
    assert len(used) == 4
    assert len({gpu for gpu, _ in used}) == len({pid for _, pid in used}) == 2
    assert (project.folder / "out" / "3" / ".hydra" / "overrides.yaml").read_text() == "- +seed=4\n- +seconds=0.5\n"
    assert project.host.is_given_back()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("raise", "this rate diverges"),
        ("die", "was killed while it ran"),
        ("unsendable", "what the job returned cannot be pickled"),
    ],
)
def test_a_job_that_fails_is_told_and_the_others_are_finished(project: Project, what: str, expected: str) -> None:
    done = project.run("+seed=1", f"+what={what},use,use", "hydra.launcher.max_workers=1")
    assert done.returncode == 1
    assert expected in done.stderr
    assert len(project.used()) == 3
    assert project.host.is_given_back()


def test_a_job_that_no_gpu_can_ever_serve_is_refused_with_the_reason(project: Project) -> None:
    done = project.run("+seed=1,2", "hydra.launcher.count=9")
    assert done.returncode == 1
    assert "The request can never be granted: 9 GPUs requested, 4 of 4 could ever serve it" in done.stderr
    assert project.used() == []
