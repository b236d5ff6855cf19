"""The shares of a build's writers: what the store lacks, by ranks and steps."""

import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.runs import resolved_run, revised_run
from xtoken_core.teacher_store.files import LocalFiles
from xtoken_core.teacher_store.identity import identity_of
from xtoken_core.teacher_store.shards import Entry
from xtoken_core.teacher_store.store import TeacherStore
from xtoken_services.common.stores.store_records import missing_steps
from xtoken_services.common.text.run_order import record_of

PER_STEP = 8
ENTRY = Entry("shard", 0, 1, 0, 1, "")


@given(st.integers(1, 70), st.integers(1, 3), st.sets(st.integers(0, 69)), st.sets(st.integers(0, 69)))
def test_every_missing_record_is_in_one_share_whenever_a_writer_starts(
    positions: int, ranks: int, stored: set[int], later: set[int]
) -> None:
    run = revised_run(resolved_run(Path("/none"), positions=positions, ranks=ranks), teacher={"content": "hidden"})
    store = TeacherStore(LocalFiles(Path("/none")), identity_of(run, 0))
    store.entries = dict.fromkeys(stored, ENTRY)
    shares = missing_steps(run, store)
    assert len(shares) == ranks
    found = [position for share in shares for step in share for position in step]
    wanted = [position for position in range(positions) if record_of(run, position) not in stored]
    assert sorted(found) == wanted
    for share in shares:
        flat = list(itertools.chain(*share))
        assert flat == sorted(flat)
        assert [len(step) for step in share[:-1]] == [PER_STEP] * (len(share) - 1)
    store.entries |= dict.fromkeys(later, ENTRY)  # other writers have gone on when this one is started again
    for before, after in zip(shares, missing_steps(run, store), strict=True):
        assert set(itertools.chain(*after)) <= set(itertools.chain(*before))
