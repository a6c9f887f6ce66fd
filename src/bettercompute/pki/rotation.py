"""The life of the installation's trusted keys: each is prepared, comes into use, is replaced, and is trusted no more.

Nodes learn of a key before anything depends on it and forget it only when nothing depends on it, so that at no step of
a rotation anybody is locked out, however the steps are interrupted. Which key is in use is decided by its stage in the
database, never by a file's name: a process that holds the key files of two roots uses the one that is current. See
docs/rotation.md, "The life of a key"; decisions 0130.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bettercompute.protocol.statuses import Reason, refuse

NAMED_MAX = 20
"""So many nodes, gateways and tokens are named in a refusal; the rest is counted."""
EXCEPTED_MAX = 1_000
"""So many nodes may a step leave behind, each of them named by an operator."""
SETTLE_MS = 60_000
"""A request that began before the switch has ended by then, or was undone."""


class Purpose(StrEnum):
    """What a key is for: each purpose is rotated by itself. The values are the names of its files."""

    COMMAND_ROOT = "command-root"
    JOIN_SIGNING = "join-signing"
    SERVING_CA = "serving-ca"
    NODE_CA = "node-ca"


class KeyStage(StrEnum):
    """Where a key is in its life."""

    NEXT = "next"
    """Trusted, and not in use yet."""
    CURRENT = "current"
    PREVIOUS = "previous"
    """Replaced, and still trusted."""
    RETIRED = "retired"
    """Trusted no more, for good."""


class Step(StrEnum):
    """What an operator asks for, in this order."""

    PREPARE = "prepare"
    SWITCH = "switch"
    RETIRE = "retire"


MOVES: dict[tuple[KeyStage, Step], KeyStage] = {
    (KeyStage.NEXT, Step.PREPARE): KeyStage.RETIRED,
    (KeyStage.NEXT, Step.SWITCH): KeyStage.CURRENT,
    (KeyStage.CURRENT, Step.SWITCH): KeyStage.PREVIOUS,
    (KeyStage.CURRENT, Step.RETIRE): KeyStage.CURRENT,
    (KeyStage.PREVIOUS, Step.RETIRE): KeyStage.RETIRED,
    (KeyStage.RETIRED, Step.RETIRE): KeyStage.RETIRED,
}
"""What a step that is allowed makes of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """A key with its place in the life of its purpose."""

    purpose: Purpose
    key_sha256: str
    """The SHA-256 of its SubjectPublicKeyInfo, in hex."""
    public_der: bytes
    """A certificate for CAs and roots, a SubjectPublicKeyInfo for the join-signing key."""
    stage: KeyStage
    companion_der: bytes = b""
    """The key that is rotated along with it: the join-encryption key beside the join-signing one."""
    first_version: int = 0
    """The first trust bundle that lists it; 0: none does yet."""
    changed_at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Nodes that a step has to wait for; or gateways, or tokens."""

    count: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {self.count - len(self.names)} more" if self.count > len(self.names) else ""
        return ", ".join(self.names) + more


NOBODY = Behind(count=0, names=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependents:
    """What still depends on the keys of a purpose, as far as a step must ask."""

    behind: Behind = NOBODY
    """Nodes that do not hold the bundle which lists the next key; of the purpose's own kind, see `waits_for_absent`.
    Those that an operator has excepted are not among them."""
    gateways: Behind = NOBODY
    """Live gateways that do not know the next node CA, or show a certificate of the previous serving CA."""
    tokens: Behind = NOBODY
    """Join tokens that are good and pin nothing but the previous key."""
    open_commands: int = 0
    """Commands that have not ended and are signed under a previous root."""
    specs: int = 0
    """Nodes whose newest spec is signed under a previous root."""
    now_ms: int = 0


def waits_for_absent(purpose: Purpose) -> bool:
    """Say whether the switch waits for nodes that are away, too.

    Of a new command root a node hears in Welcome, before anything is signed under it. A node that does not know the
    next serving CA or join key cannot even come and hear of it.
    """
    return purpose in {Purpose.SERVING_CA, Purpose.JOIN_SIGNING}


def in_stage(keys: Sequence[TrustedKey], purpose: Purpose, stage: KeyStage) -> tuple[TrustedKey, ...]:
    """Return the keys of a purpose that are in this stage."""
    return tuple(key for key in keys if key.purpose is purpose and key.stage is stage)


def trusted(keys: Sequence[TrustedKey], purpose: Purpose) -> tuple[TrustedKey, ...]:
    """Return the keys of a purpose that nodes are to trust, the one in use first."""
    order = (KeyStage.CURRENT, KeyStage.NEXT, KeyStage.PREVIOUS)
    return tuple(key for stage in order for key in in_stage(keys, purpose, stage))


def adopt(keys: Sequence[TrustedKey], held: Sequence[TrustedKey]) -> tuple[TrustedKey, ...]:
    """Return the keys once a process has started whose folder holds these of one purpose, that of the plain name first.

    The first start founds the installation. Later a folder without the key in use, whose own was never heard of, means
    that the database was restored from before a rotation: the key is added as the one in use, for nothing is lost by
    trusting more. A key that was retired is refused INVALID_CONFIG: that folder is a copy from before.
    """
    own = held[0]
    stages = {key.key_sha256: key.stage for key in keys if key.purpose is own.purpose}
    if any(stages.get(key.key_sha256) is KeyStage.CURRENT for key in held):
        return tuple(keys)
    if own.key_sha256 not in stages:
        replaced = in_stage(keys, own.purpose, KeyStage.CURRENT)
        before = (replace(key, stage=KeyStage.PREVIOUS) if key in replaced else key for key in keys)
        return (*before, replace(own, stage=KeyStage.CURRENT))
    if stages[own.key_sha256] is KeyStage.RETIRED:
        raise refuse(
            Reason.INVALID_CONFIG,
            f"the key folder's {own.purpose} ({own.key_sha256[:16]}) was retired: it is a copy from before a rotation; "
            "copy the present key folder here",
        )
    return tuple(keys)


def prepare(keys: Sequence[TrustedKey], new: TrustedKey) -> tuple[TrustedKey, ...]:
    """Return the keys with `new` beside the one in use; asked again with the same key nothing changes.

    Another that was prepared before makes way: nothing depends on it yet, and its files may be lost.
    """
    purpose = new.purpose
    _require_founded(keys, purpose)
    for key in keys:
        if (key.purpose, key.key_sha256) == (purpose, new.key_sha256):
            if key.stage is KeyStage.NEXT:
                return tuple(keys)
            raise refuse(Reason.CONFLICT, f"this {purpose} is {key.stage} already: prepare a new one")
    for held in in_stage(keys, purpose, KeyStage.PREVIOUS):
        raise refuse(
            Reason.CONFLICT,
            f"the last rotation of the {purpose} is not finished: {held.key_sha256[:16]} is still trusted; run the "
            "stage retire first",
        )
    return (*(_moved(key, Step.PREPARE, purpose) for key in keys), replace(new, stage=KeyStage.NEXT))


def switch(
    keys: Sequence[TrustedKey], purpose: Purpose, *, key_sha256: str, dependents: Dependents
) -> tuple[TrustedKey, ...]:
    """Return the keys once the next one is in use; refuse CONFLICT while nodes do not know it, and name them."""
    _require_founded(keys, purpose)
    if [key.key_sha256 for key in in_stage(keys, purpose, KeyStage.CURRENT)] == [key_sha256]:
        return tuple(keys)
    prepared = in_stage(keys, purpose, KeyStage.NEXT)
    if not prepared:
        raise refuse(Reason.CONFLICT, f"no next {purpose} is prepared: run the stage prepare first")
    if prepared[0].key_sha256 != key_sha256:
        raise refuse(
            Reason.CONFLICT,
            f"the {purpose} that is prepared is {prepared[0].key_sha256[:16]}, not {key_sha256[:16]}: is the key "
            "folder the one in which it was made?",
        )
    if dependents.gateways.count:
        raise refuse(
            Reason.CONFLICT,
            f"{dependents.gateways.count} gateways do not know the next {purpose} and would turn away its nodes: "
            f"{dependents.gateways}; copy {purpose}.pem to their key folders, and within seconds they say so",
        )
    if dependents.behind.count:
        which = "nodes" if waits_for_absent(purpose) else "connected nodes"
        cure = (
            "wait until they have been here; those that will not come back revoke, or leave behind with --except NODE"
            if waits_for_absent(purpose)
            else "gateways ask them to reconnect for it; `pki trust-version` shows who holds what, and --except NODE "
            "leaves one behind"
        )
        raise refuse(
            Reason.CONFLICT,
            f"{dependents.behind.count} {which} do not hold trust version {prepared[0].first_version}, which lists the "
            f"next {purpose}: {dependents.behind}; {cure}",
        )
    return tuple(_moved(key, Step.SWITCH, purpose) for key in keys)


def retire(keys: Sequence[TrustedKey], purpose: Purpose, *, dependents: Dependents) -> tuple[TrustedKey, ...]:
    """Return the keys without those that were replaced; refuse CONFLICT while something depends on one."""
    _require_founded(keys, purpose)
    replaced = in_stage(keys, purpose, KeyStage.PREVIOUS)
    if not replaced:
        if in_stage(keys, purpose, KeyStage.NEXT):
            raise refuse(Reason.CONFLICT, f"the next {purpose} is not in use yet: run the stage switch first")
        return tuple(keys)
    settled_ms = max(key.changed_at_ms for key in replaced) + SETTLE_MS
    if dependents.now_ms < settled_ms:
        raise refuse(
            Reason.CONFLICT,
            f"the {purpose} was switched less than {SETTLE_MS // 1000} s ago, and what began before may still be "
            f"signed by the one before: ask again in {settled_ms - dependents.now_ms} ms",
        )
    if dependents.open_commands or dependents.specs:
        raise refuse(
            Reason.CONFLICT,
            f"{dependents.open_commands} commands that have not ended and the specs of {dependents.specs} nodes are "
            f"signed under the previous {purpose}: specs are signed anew by the worker within a minute or so, commands "
            "end or expire (`commands list`), or are cancelled",
        )
    if dependents.gateways.count:
        raise refuse(
            Reason.CONFLICT,
            f"{dependents.gateways.count} gateways show a certificate of the previous {purpose}: "
            f"{dependents.gateways}; issue theirs anew (`pki issue-gateway --san NAME --out DIR`), or stop them; they "
            "say so within seconds",
        )
    if dependents.tokens.count:
        raise refuse(
            Reason.CONFLICT,
            f"{dependents.tokens.count} join tokens that are good pin the previous {purpose} alone: "
            f"{dependents.tokens}; wait until they are used or over, or `token revoke` them and make new ones",
        )
    if dependents.behind.count:
        raise refuse(
            Reason.CONFLICT,
            f"{dependents.behind.count} nodes still depend on the previous {purpose}: {dependents.behind}; wait until "
            "they have been here; those that will not come back revoke, or leave behind with --except NODE",
        )
    return tuple(_moved(key, Step.RETIRE, purpose) for key in keys)


def _moved(key: TrustedKey, step: Step, purpose: Purpose) -> TrustedKey:
    if key.purpose is not purpose:
        return key
    return replace(key, stage=MOVES.get((key.stage, step), key.stage))


def _require_founded(keys: Sequence[TrustedKey], purpose: Purpose) -> None:
    if not in_stage(keys, purpose, KeyStage.CURRENT):
        raise refuse(Reason.CONFLICT, f"there is no {purpose} in use yet: start the api, which publishes the first")
