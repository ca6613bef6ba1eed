"""The channel between `gpu-pool` and its lease process."""

from __future__ import annotations

from gpu_worker_pool.leases.channel import channel


def test_what_counts_arrives_also_at_a_process_that_was_suspended_for_hours() -> None:
    ours, theirs = channel()
    for second in range(10_000):
        theirs.report("waiting", position=1, summary=f"waiting {second} s", reasons=["GPU 0: held by somebody"] * 8)
    for kind in ("granted", "lost", "signals"):
        assert theirs.send(kind, gpus=[{"gpu_id": number, "uuid": "GPU-" + "0" * 36} for number in range(16)])
    messages = ours.receive() or []
    assert [message["kind"] for message in messages[-4:]] == ["waiting", "granted", "lost", "signals"]
    theirs.report("waiting", position=1, summary="reading again", reasons=[])
    assert [message["summary"] for message in ours.receive() or []] == ["reading again"]
    theirs.close()
    assert ours.receive() is None
    assert not ours.send("done", is_clean=True)
    ours.report("waiting", position=1)
    ours.close()
