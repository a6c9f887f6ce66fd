"""What a FakeDaemon makes of commands: by its levers instead of by handlers, and without a journal on disk.

Credits, lanes and the answers to a duplicate, to an unknown cancel and to a lane without credits are those of bcd
(`delivery.lanes`, `session.daemon_commands`). Updates of one turn of the loop leave in one frame, where the gateway
reads such.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bettercompute.delivery import lanes
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.delivery.lanes import DaemonLane
from bettercompute.protocol import messages
from bettercompute.protocol.versions import UPGRADE_KIND
from bettercompute.session import busy
from bettercompute.session.resume import CANCELLED
from bettercompute.testing.profiles import Answer, Levers, Profile

# Ids of ended commands that are remembered, so that a late delivery gets the stored result: a test's worth.
SETTLED_MAX = 10_000


@dataclass(slots=True, kw_only=True)
class HeldCommand:
    """A command that was taken. `update` is its end, once there is one."""

    body: messages.CommandBody
    attempt: int
    process_id: str
    answer: Answer
    update: messages.CommandUpdate | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class FakeCommands:
    """The commands of one FakeDaemon. `tell` sends updates, and drops them while there is no session."""

    def __init__(
        self,
        *,
        profile: Profile,
        levers: Levers,
        tell: Callable[[Iterable[messages.CommandUpdate]], None],
        time_ms: Callable[[], int],
    ) -> None:
        self.lanes: dict[int, DaemonLane] = {}
        self.held: dict[str, HeldCommand] = {}
        """Taken, and not ended or not acked."""
        self.settled: dict[str, messages.CommandUpdate] = {}
        """Ended and acked, or cancelled before delivery."""
        self.upgrade_only = False
        self.process_id = ""
        self.delivered = 0
        self.on_begin: Callable[[messages.CommandBody], None] = lambda _: None
        """Called when a command's effect begins."""
        self.profile = profile
        self.levers = levers
        self._tell = tell
        self._time_ms = time_ms

    def entries(self) -> Mapping[str, JournalEntry]:
        """Return what is held as a journal would have it: what Hello and Welcome go by."""
        return {command_id: self._entry(command_id, held) for command_id, held in self.held.items()}

    def deliver(self, frame: messages.Command) -> None:
        """Take a command frame."""
        body = messages.CommandBody.FromString(frame.body)
        self.delivered += 1
        lane = self.lanes.get(body.lane)
        if lane is not None:
            lane = self.lanes[body.lane] = lanes.received(lane)
        held = self.held.get(body.command_id)
        if held is not None:
            held.attempt = frame.attempt
            again = held.update or self._update(body.command_id, frame.attempt, CommandState.RUNNING)
            self._tell((again,))
            return
        if body.command_id in self.settled:
            self._tell((self.settled[body.command_id],))
            return
        answer = self.levers.answer_to(body.kind)
        reject = self._reject(body, lane, answer)
        if reject is not None:
            self._tell((self._update(body.command_id, frame.attempt, CommandState.REJECTED, reject=reject),))
            return
        self._begin(HeldCommand(body=body, attempt=frame.attempt, process_id=self.process_id, answer=answer))

    def cancel(self, frame: messages.Cancel) -> None:
        """Take a cancel frame: stop what runs, tell what has ended, remember what is unknown."""
        held = self.held.get(frame.command_id)
        if held is None:
            update = self._update(frame.command_id, 0, CommandState.CANCELLED, reason=CANCELLED)
            self._settle(frame.command_id, self.settled.get(frame.command_id, update))
            self._tell((self.settled[frame.command_id],))
        elif held.update is not None:
            self._tell((held.update,))
        elif self.levers.obeys_cancel:
            self._end(held, Answer(state=CommandState.CANCELLED, reason=CANCELLED))

    def acked(self, command_ids: Iterable[str]) -> None:
        """Forget what the gateway has committed."""
        for command_id in command_ids:
            held = self.held.get(command_id)
            if held is not None and held.update is not None:
                del self.held[command_id]
                self._settle(command_id, held.update)

    def finish(self, command_id: str, answer: Answer | None = None) -> None:
        """End a command that runs, by its own answer or another."""
        held = self.held[command_id]
        if held.update is None:
            self._end(held, answer or held.answer)

    def forget(self, *, unfinished_only: bool) -> None:
        """Lose what ran (a restart), or everything (a lost journal)."""
        for command_id, held in list(self.held.items()):
            if held.update is not None and unfinished_only:
                continue
            if held.timer is not None:
                held.timer.cancel()
            del self.held[command_id]
        if not unfinished_only:
            self.settled.clear()

    def _begin(self, held: HeldCommand) -> None:
        body, answer = held.body, held.answer
        self.on_begin(body)
        self.held[body.command_id] = held
        if body.lane in self.lanes:
            self.lanes[body.lane] = lanes.held(self.lanes[body.lane], body.command_id)
        if answer.says_running:
            self._tell((self._update(body.command_id, held.attempt, CommandState.RUNNING, started=True),))
        if not answer.ends:
            return
        if answer.delay_ms:
            loop = asyncio.get_running_loop()
            held.timer = loop.call_later(answer.delay_ms / 1000, self.finish, body.command_id)
        else:
            self._end(held, answer)

    def _end(self, held: HeldCommand, answer: Answer) -> None:
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None
        command_id, lane = held.body.command_id, held.body.lane
        held.update = self._update(command_id, held.attempt, answer.state, reason=answer.reason, started=True)
        held.update.result = answer.result
        held.update.message = answer.message
        if lane in self.lanes:
            self.lanes[lane] = lanes.let_go(self.lanes[lane], command_id)
        self._tell((held.update,))

    def _reject(
        self, body: messages.CommandBody, lane: DaemonLane | None, answer: Answer
    ) -> messages.CommandRejectReason.ValueType | None:
        if answer.reject is not None:
            return answer.reject
        if body.kind in self.profile.lacks_kinds or (self.upgrade_only and body.kind != UPGRADE_KIND):
            return messages.COMMAND_REJECT_REASON_UNSUPPORTED
        if busy.too_early(not_before_ms=body.not_before_ms, time_ms=self._time_ms()):
            return messages.COMMAND_REJECT_REASON_BUSY
        if self.levers.counts_credits and (lane is None or lane.free == 0):
            return messages.COMMAND_REJECT_REASON_BUSY
        return None

    def _update(
        self,
        command_id: str,
        attempt: int,
        state: CommandState,
        *,
        reason: str = "",
        reject: messages.CommandRejectReason.ValueType = messages.COMMAND_REJECT_REASON_UNSPECIFIED,
        started: bool = False,
    ) -> messages.CommandUpdate:
        now_ms = self._time_ms()
        return messages.CommandUpdate(
            command_id=command_id,
            state=messages.CommandState.ValueType(state),
            attempt=attempt,
            reason=reason,
            reject_reason=reject,
            at_ms=now_ms,
            started_at_ms=now_ms if started else 0,
        )

    def _settle(self, command_id: str, update: messages.CommandUpdate) -> None:
        self.settled[command_id] = update
        if len(self.settled) > SETTLED_MAX:
            del self.settled[next(iter(self.settled))]

    def _entry(self, command_id: str, held: HeldCommand) -> JournalEntry:
        return JournalEntry(
            command_id=command_id,
            kind=held.body.kind,
            lane=held.body.lane,
            attempt=held.attempt,
            state=CommandState.RUNNING if held.update is None else CommandState(held.update.state),
            not_after_ms=held.body.not_after_ms,
            process_id=held.process_id,
            started=True,
            update=b"" if held.update is None else held.update.SerializeToString(),
        )
