"""What a daemon lets itself be told: whose signature a command needs, and whose approval.

The gateway relays; the trust bundle says which roots may sign and which people must approve. A command that does not
pass is rejected with its reason, before anything of it is kept. See docs/security.md, "Signed intent" and "Approvers";
decisions 0120 and 0121.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.errors import Refused
from bettercompute.pki import intent, quorum
from bettercompute.pki.quorum import NO_APPROVERS, Approval, ApproverSet, Unbatched
from bettercompute.pki.trust import CommandRoot, TrustContent
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import CommandKind
from bettercompute.protocol.statuses import Reason


@dataclass(frozen=True, slots=True)
class CommandRefusal:
    """What speaks against a command: its signature, its approval, its body."""

    reason: messages.CommandRejectReason.ValueType
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Who may tell this daemon what: of the bundle in force, and of the approver set that it enforces."""

    command_roots: tuple[CommandRoot, ...] = ()
    """None: signing is off."""
    approvers: ApproverSet = NO_APPROVERS

    @staticmethod
    def of(content: TrustContent, approvers: ApproverSet) -> Authority:
        """Return it of the bundle in force and the set that is enforced, which need not be the bundle's."""
        return Authority(command_roots=content.command_roots, approvers=approvers)


ANYBODY = Authority()
"""Of an installation that signs nothing and has no approvers: whoever holds the session."""


def judge_signature(
    frame: messages.Command, body: messages.CommandBody, authority: Authority, *, server_time_ms: int
) -> CommandRefusal | None:
    """Return what is wrong with a command's signature; None when it is good, or none is needed."""
    try:
        intent.check_command(frame, body, roots=authority.command_roots, now_ms=server_time_ms)
    except Refused as refused:
        kind_alone = refused.reason == Reason.ACCESS_DENIED
        reason = (
            messages.COMMAND_REJECT_REASON_KIND_NOT_ALLOWED
            if kind_alone
            else messages.COMMAND_REJECT_REASON_BAD_SIGNATURE
        )
        return CommandRefusal(reason, refused.message)
    return None


def judge_approval(
    frame: messages.Command,
    body: messages.CommandBody,
    kind: CommandKind,
    authority: Authority,
    *,
    trust_domain: str,
    unbatched: Unbatched,
    server_time_ms: int,
    now_ms: int,
) -> CommandRefusal | Approval:
    """Return on what grounds a command may start, or that it needs an approval which it does not have."""
    try:
        return quorum.judge_approval(
            frame,
            body,
            kind,
            approvers=authority.approvers,
            trust_domain=trust_domain,
            unbatched=unbatched,
            server_time_ms=server_time_ms,
            monotonic_ms=now_ms,
        )
    except Refused as refused:
        return CommandRefusal(messages.COMMAND_REJECT_REASON_APPROVAL_REQUIRED, refused.message)
