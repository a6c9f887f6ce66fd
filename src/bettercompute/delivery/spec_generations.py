"""The bytes of a new generation: the whole spec, and the patch that leads to it when one section differs.

Made once, when it is published, and from then on only carried: what a daemon receives are these bytes, and a signature
over them stays true. See docs/desired-state.md, "Generations"; decisions 0106.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from bettercompute.pki.intent import IntentSigner
from bettercompute.protocol import messages
from bettercompute.protocol.frames import canonical_bytes, encode_message, unknown_field_numbers
from bettercompute.protocol.limits import MAX_SPEC_BODY_BYTES

SECTIONS = tuple(field.name for field in messages.NodeSpec.DESCRIPTOR.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration:
    """What is stored of a generation. The signatures are serialized `Signature`s over the bodies; empty: unsigned."""

    generation: int
    body: bytes
    """A serialized `DesiredStateBody` with `full`."""
    spec_sha256: bytes
    changed: tuple[str, ...]
    """The sections that differ from the generation before, by name, or by number where this release has no name."""
    signature: bytes = b""
    patch_base_generation: int | None = None
    patch_body: bytes = b""
    patch_signature: bytes = b""
    signed_under: str | None = None
    """The command root of the signer; None: unsigned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """For which node a generation is made, and when."""

    node_id: str
    trust_domain: str
    generation: int
    issued_at_ms: int


def spec_sha256(spec: messages.NodeSpec) -> bytes:
    """Return the hash that Hello carries of a held spec."""
    return hashlib.sha256(canonical_bytes(spec)).digest()


def changed_sections(before: messages.NodeSpec, after: messages.NodeSpec) -> tuple[str, ...]:
    """Return the names of the sections that differ."""
    named = [
        field.name
        for field in messages.NodeSpec.DESCRIPTOR.fields
        if before.HasField(field.name) != after.HasField(field.name)  # type: ignore[arg-type]  # one of its own
        or getattr(before, field.name) != getattr(after, field.name)
    ]
    numbers = {*unknown_field_numbers(before), *unknown_field_numbers(after)}
    if numbers and canonical_bytes(_only_unknown(before)) != canonical_bytes(_only_unknown(after)):
        named += [str(number) for number in sorted(numbers)]
    return tuple(named)


def _only_unknown(spec: messages.NodeSpec) -> messages.NodeSpec:
    rest = messages.NodeSpec()
    rest.CopyFrom(spec)
    for name in SECTIONS:
        rest.ClearField(name)  # type: ignore[arg-type]  # one of its own fields
    return rest


def compose(
    spec: messages.NodeSpec,
    *,
    before: messages.DesiredStateBody | None,
    of: Circumstances,
    signer: IntentSigner | None = None,
) -> NewGeneration:
    """Return the bytes of a generation, signed where there is a signer; `before` is the body that is stored now.

    Raises `ProtocolError` FRAME_TOO_LARGE for a spec over its bound.
    """
    changed = changed_sections(messages.NodeSpec() if before is None else before.full, spec)
    whole = _body(spec, of)
    whole.full.CopyFrom(spec)
    body = encode_message(whole, limit=MAX_SPEC_BODY_BYTES)
    if before is None or len(changed) != 1 or changed[0] not in SECTIONS:
        return NewGeneration(
            generation=of.generation,
            body=body,
            signature=_signature(body, signer),
            spec_sha256=whole.spec_sha256,
            changed=changed,
            signed_under=None if signer is None else signer.root_sha256,
        )
    patch = _patch(spec, section=changed[0], base_generation=before.generation, of=of)
    return NewGeneration(
        generation=of.generation,
        body=body,
        signature=_signature(body, signer),
        spec_sha256=whole.spec_sha256,
        changed=changed,
        patch_base_generation=before.generation,
        patch_body=patch,
        patch_signature=_signature(patch, signer),
        signed_under=None if signer is None else signer.root_sha256,
    )


def _signature(body: bytes, signer: IntentSigner | None) -> bytes:
    return b"" if signer is None else signer.sign_desired_state(body)


def _body(spec: messages.NodeSpec, of: Circumstances) -> messages.DesiredStateBody:
    return messages.DesiredStateBody(
        node_id=of.node_id,
        trust_domain=of.trust_domain,
        generation=of.generation,
        issued_at_ms=of.issued_at_ms,
        spec_sha256=spec_sha256(spec),
    )


def _patch(spec: messages.NodeSpec, *, section: str, base_generation: int, of: Circumstances) -> bytes:
    body = _body(spec, of)
    body.patch.base_generation = base_generation
    body.patch.section = section
    body.patch.field_number = messages.NodeSpec.DESCRIPTOR.fields_by_name[section].number
    if spec.HasField(section):  # type: ignore[arg-type]  # one of its own fields
        getattr(body.patch.spec, section).CopyFrom(getattr(spec, section))
        getattr(body.patch.spec, section).SetInParent()
    return body.SerializeToString()


def merged(held: messages.NodeSpec, patch: messages.SectionPatch) -> messages.NodeSpec:
    """Return the spec that a patch leads to: the held one with one section replaced, or without it."""
    spec = messages.NodeSpec()
    spec.CopyFrom(held)
    if patch.section in SECTIONS:
        spec.ClearField(patch.section)  # type: ignore[arg-type]  # checked to be one of its fields
    spec.MergeFrom(patch.spec)
    return spec
