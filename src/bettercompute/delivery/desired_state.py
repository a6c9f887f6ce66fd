"""Desired state: what the gateway offers and what the daemon takes.

A generation is the whole NodeSpec, stored and signed as bytes; a patch names a section, its base and the new
generation. The gateway relays stored bytes and never re-encodes them. Generations only rise: the daemon keeps the
highest one it has applied outside the journal, so that a restored disk or a lying gateway cannot bring back an older
spec. See docs/delivery.md, "Desired state" and docs/desired-state.md,
"On its way"; decisions 0058 and 0106.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# What the store's bigint holds.
GENERATION_MAX: Final = 2**63 - 1
# A database restored from a backup is behind its daemons by the specs set since then. Who tells more than this is not
# believed: one daemon's nonsense must not use up the generations of its node.
GENERATION_LEAP_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpec:
    """A node's newest generation as the store holds it: the full body, and the patch that leads to it when there is
    one.
    """

    generation: int
    body: bytes
    """A serialized `DesiredStateBody` with `full`."""
    signature: bytes = b""
    """The serialized `Signature` over `body`; empty when specs are not signed."""
    patch_base_generation: int | None = None
    patch_body: bytes = b""
    patch_signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Offer:
    """What to put into a `DesiredState` frame."""

    body: bytes
    signature: bytes


def due_at_welcome(*, generation: int, has_spec: bool, applied_generation: int, spec_sha256: bytes) -> bool:
    """Say whether Welcome is followed by a full spec: the node's is newer, or the daemon reports that it holds none."""
    return has_spec and (generation > applied_generation or not spec_sha256)


def offer(
    spec: StoredSpec,
    *,
    offered_generation: int,
    applied_generation: int,
    requested: bool,
    full_only: bool,
    signed_only: bool,
) -> Offer | None:
    """Return what to send of a generation, or None. Each is offered once per session, unless the daemon asks for it.

    A patch is used only when the daemon has applied exactly its base, and never as the answer to a request.
    A signed-only session withholds what is not signed.
    """
    if spec.generation <= offered_generation and not requested:
        return None
    patch_fits = bool(spec.patch_body) and spec.patch_base_generation == applied_generation
    if patch_fits and not (requested or full_only) and (spec.patch_signature or not signed_only):
        return Offer(spec.patch_body, spec.patch_signature)
    if signed_only and not spec.signature:
        return None
    return Offer(spec.body, spec.signature)


class Verdict(StrEnum):
    """What the daemon does with a desired state."""

    TAKE = "take"
    HELD = "held"
    """Already read: nothing to do."""
    GENERATION_BEHIND = "generation-behind"
    BASE_MISMATCH = "base-mismatch"
    """A patch whose base is not what is applied: ask for the full spec."""
    WRONG_NODE = "wrong-node"
    WRONG_TRUST_DOMAIN = "wrong-trust-domain"
    EMPTY = "empty"
    """Neither a full spec nor a patch."""
    BAD_GENERATION = "bad-generation"
    """No generation at all, or one that no store can hold."""
    UNREADABLE = "unreadable"
    """Bytes that are no desired state."""
    BAD_SIGNATURE = "bad-signature"
    """Not signed, or not by a key under a root that this node was told."""
    HASH_MISMATCH = "hash-mismatch"
    """A patch that leads to another spec than its sender has: ask for the full one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSpec:
    """What the daemon knows when a desired state arrives."""

    node_id: str
    trust_domain: str
    observed_generation: int
    applied_generation: int
    floor_generation: int
    """The highest generation ever applied, from identity.json."""
    holds_spec: bool


def of_another(owner_id: str, owner_domain: str, *, node_id: str, trust_domain: str) -> Verdict | None:
    """Return why a body is not this node's, or None."""
    if node_id != owner_id:
        return Verdict.WRONG_NODE
    if trust_domain and owner_domain and trust_domain != owner_domain:
        return Verdict.WRONG_TRUST_DOMAIN
    return None


def judge(
    held: HeldSpec, *, node_id: str, trust_domain: str, generation: int, full: bool, patch_base_generation: int | None
) -> Verdict:
    """Return what to do with a body whose signature has been judged.

    Exactly one of `full` and a patch base is expected.
    """
    stranger = of_another(held.node_id, held.trust_domain, node_id=node_id, trust_domain=trust_domain)
    if stranger is not None:
        return stranger
    if not 0 < generation <= GENERATION_MAX:
        return Verdict.BAD_GENERATION
    if generation < max(held.floor_generation, held.applied_generation):
        return Verdict.GENERATION_BEHIND
    if full:
        return Verdict.HELD if held.holds_spec and generation <= held.observed_generation else Verdict.TAKE
    if patch_base_generation is None:
        return Verdict.EMPTY
    if held.holds_spec and generation <= held.observed_generation:
        return Verdict.HELD
    # What is held must be the base as well: a parked generation is read, and is not what the patch was made over.
    if not held.holds_spec or {held.applied_generation, held.observed_generation} != {patch_base_generation}:
        return Verdict.BASE_MISMATCH
    return Verdict.TAKE


# The verdicts that a full spec helps against: the daemon asks the gateway for it.
ASK_FOR_FULL = frozenset({Verdict.BASE_MISMATCH, Verdict.HASH_MISMATCH})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGenerations:
    """A node's generations as the store holds them; `observed` and `applied` are the daemon's word."""

    generation: int
    observed_generation: int
    applied_generation: int


def known_at_hello(*, generation: int, spec_sha256: bytes, observed_generation: int, held_sha256: bytes) -> int:
    """Return which generation a daemon counts as having read, by what its Hello says and what the store holds.

    One that holds another spec under the number of the node's present one has it of a database that was restored since
    then. It would take what we have for read already: the number is used up, and so it counts as knowing the next.
    """
    used_up = 0 < generation == observed_generation and held_sha256 and spec_sha256 and held_sha256 != spec_sha256
    return observed_generation + 1 if used_up else observed_generation


def overtaken_by(held: NodeGenerations) -> int | None:
    """Return the generation that the daemon has read or applied above the node's own, or None.

    It happens when the database was restored from a backup. The daemon would refuse what is published next, or take it
    for something it has read already.
    """
    told = max(held.observed_generation, held.applied_generation)
    return told if held.generation < told <= held.generation + GENERATION_LEAP_MAX else None


def next_generation(held: NodeGenerations) -> int:
    """Return the generation that a spec published now gets: above the node's own, and above what its daemon knows."""
    return (overtaken_by(held) or held.generation) + 1
