"""What the core exported under other names before can still be imported."""

from gpu_worker_pool import core


def test_former_names_are_the_same_things() -> None:
    assert core.Wishes is core.Requirements
    assert core.PLAIN is core.ANY_GPU
    assert core.StoppedListening is core.PollAbandoned
    assert core.explain_wishes is core.explain_requirements
