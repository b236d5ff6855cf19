"""Clients that speak version 1: slot references per sample, and no number in the names of a single teacher."""

from __future__ import annotations

import struct
from typing import Any

from tests.contract.peers import Place
from tests.contract.test_run_calls import opened
from xtoken_core.data_plane.address import Address


class OldPlace(Place):
    """A queue that the reference client reaches by version 1."""

    def connect(self) -> Any:
        peer = super().connect()
        peer.versions = [1]
        return peer


def test_a_claim_has_a_reference_per_sample(ipc_queue: Address) -> None:
    place = OldPlace("reference", address=ipc_queue)
    run = opened(place)
    trainer = run.trainer()
    teacher, ring = run.teacher(trainer)
    ids = run.put_block()
    claim = run.fill(teacher, ring, *ids)
    hidden = ("jagged", "float32", (1,), [struct.pack("<f", value) for value in (1.0, 2.0)])
    teacher.call("complete", partition=run.partition, lease=claim["lease"], columns={"teacher_hidden_states": hidden})
    batch = run.batch(trainer, *ids)
    slot = {"ring": ring, "slot": claim["slot"], "generation": claim["generation"]}
    rows = [{**slot, "row": 0}, {**slot, "row": 1}]
    assert batch["columns"] == {
        "teacher_hidden_states": hidden,
        "teacher_full_logits_ipc": ("object", "", (), rows),
    }
    assert "slots" not in batch
    place.leave()
