"""A journal under another name of its machine: same entries and events, another id, nothing desired."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bettercompute.daemon import journal_owner
from bettercompute.daemon.desired import DOCUMENT
from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.journal_records import AppendEvents, PutDocument
from bettercompute.session.effects import AckEvents
from bettercompute.system import system_world
from tests.unit.daemon.journal_samples import SMALL, accept, event


def no_id() -> str:
    raise AssertionError("nothing is renewed")


async def test_another_name_gets_another_journal_id_and_all_that_is_kept(tmp_path: Path) -> None:
    async def opened() -> Journal:
        return await Journal.open(tmp_path / "state", world=system_world(), limits=SMALL)

    journal = await opened()
    await journal_owner.settle(journal, name="spiffe://bc/old", draw_id=no_id)
    await journal.write(accept("c1"), AppendEvents((event(1), event(2), event(3))), AckEvents(2))
    await journal.write(PutDocument(DOCUMENT, b"a spec"), PutDocument("serving-ca", b"pem"))
    await journal.close()

    journal = await opened()
    await journal_owner.settle(journal, name="spiffe://bc/old", draw_id=no_id)
    before = journal.contents
    await journal_owner.settle(journal, name="spiffe://bc/new", draw_id=lambda: "another")
    told = journal.contents.meta
    assert told == replace(before.meta, journal_id="another", last_event_seq=1, acked_event_seq=0)
    [kept] = await journal.events_after(0, limit=10, limit_bytes=1 << 20)
    assert (kept.seq, kept.event, kept.recovered) == (1, event(3).event, True)
    await journal.close()

    journal = await opened()
    found = journal.contents
    assert (found.meta.journal_id, found.meta.last_event_seq, found.meta.acked_event_seq) == ("another", 1, 0)
    assert found.documents == {journal_owner.OWNER: b"spiffe://bc/new", "serving-ca": b"pem"}
    assert found.commands == before.commands
    await journal_owner.settle(journal, name="spiffe://bc/new", draw_id=no_id)
    await journal.close()
