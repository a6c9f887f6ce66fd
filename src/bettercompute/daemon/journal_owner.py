"""Whose journal it is: what a machine journaled under a name that it has no more is told under another journal id.

See docs/daemon.md, "What is kept through what".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import structlog

from bettercompute.daemon.desired import DOCUMENT as DESIRED_STATE
from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.journal_records import PutDocument, RenewJournal, Write

OWNER: Final = "owner"

log = structlog.get_logger("bcd.journal")


async def settle(journal: Journal, *, name: str, draw_id: Callable[[], str]) -> None:
    """Note that the journal is of `name`, a SPIFFE id, and where it was another's, go on under a new id.

    Of the old id the old name has acked what it has, so that the new one's events would begin with a gap. What was
    desired of the old name goes as well. Everything else is kept: it happened on this machine.
    """
    contents = journal.contents
    owner = contents.documents.get(OWNER, b"").decode()
    if owner == name:
        return
    noted: Write = PutDocument(OWNER, name.encode())
    if not owner:
        await journal.write(noted)
        return
    journal_id = draw_id()
    log.warning("the journal is of another name of this machine: it goes on under a new id", name=owner)
    await journal.write(noted, RenewJournal(journal_id), PutDocument(DESIRED_STATE, b""))
    last_seq = await journal.last_event_seq()
    meta = replace(contents.meta, journal_id=journal_id, last_event_seq=last_seq, acked_event_seq=0)
    journal.contents = replace(contents, meta=meta)
