"""A node's identity on disk: its certificates and key, where to dial, and the marks that must not go backwards.

STATE_DIR/identity.json                which certificate is in use, where to dial, what must not go backwards
STATE_DIR/identity.d/SERIAL/           node.key  node.pem (leaf first)  trust-bundle.bin  [serving-ca.pem]
STATE_DIR/identity.d/current           a symlink to SERIAL, for people and tools
STATE_DIR/identity.d/pending-join/     the key and the request of a Join that has not been answered yet
STATE_DIR/identity.d/pending-renew/    likewise of a Renew
STATE_DIR/identity.d/pending-rejoin/   likewise of a re-join by a certificate that has expired

Renaming identity.json over is the one instant at which an identity changes: it names the folder, and everything that
belongs together lies in that folder, so a crash leaves the whole old identity or the whole new one. A request and its
key are on disk before the request is sent, so a lost answer is asked for again with the same key. See
docs/security.md, "On a node's disk"; decisions 0040 and 0111.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.errors import Refused
from bettercompute.pki import certificates, identity_file, keyfiles, trust
from bettercompute.pki.identity import NodeIdentity, identity_of
from bettercompute.pki.identity_file import (
    CHAIN_FILE,
    IDENTITY_FILE,
    KEY_FILE,
    SERVING_CA_FILE,
    TRUST_FILE,
    IdentityRecord,
    damaged,
)
from bettercompute.pki.keyfiles import Disk, LocalDisk
from bettercompute.pki.quorum import NO_APPROVERS
from bettercompute.pki.trust import TakenTrust, Trust
from bettercompute.protocol.statuses import Reason, refuse

_FOLDER = "identity.d"
_CURRENT = "current"
_REQUEST_FILE = "node.csr"
_PURPOSE_FILE = "purpose"


class Purpose(Enum):
    """What a pending request was made for."""

    JOIN = "pending-join"
    RENEW = "pending-renew"
    REJOIN = "pending-rejoin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What tells this machine from a copy of its disk; None where it cannot be read."""

    machine_id: str | None = None
    dmi_uuid: str | None = None


class MachineChange(Enum):
    """How a machine differs from the one that the identity was made on."""

    NONE = "none"
    ONE = "one"
    """A reinstalled system, or a new board: worth a warning."""
    BOTH = "both"
    """Another machine: refuses to start until told to adopt the identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A key and the certificate request for it, both on disk."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    csr_der: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A verified answer to a request: what an identity is made of."""

    chain_der: tuple[bytes, ...]
    trust: Trust
    identity_generation: int
    gateway_urls: tuple[str, ...]
    server_time_ms: int
    serving_ca_pem: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A whole identity as loaded: the record, the key with its chain, and what is trusted."""

    record: IdentityRecord
    node: NodeIdentity
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    chain_der: tuple[bytes, ...]
    trust: Trust

    @property
    def not_after_ms(self) -> int:
        """When the certificate expires."""
        return certificates.not_after_ms(certificates.load_certificate(self.chain_der[0]))

    @property
    def renew_at_ms(self) -> int:
        """Two thirds of the way from issuance to expiry; the caller adds its jitter."""
        leaf = certificates.load_certificate(self.chain_der[0])
        issued_ms = certificates.not_before_ms(leaf) + certificates.BACKDATE_MS
        return issued_ms + (certificates.not_after_ms(leaf) - issued_ms) * 2 // 3

    @property
    def chain_pem(self) -> bytes:
        """The certificate and what leads to the node CA, for TLS."""
        return certificates.chain_to_pem(self.chain_der)

    @property
    def key_pem(self) -> bytes:
        """The private key, for TLS."""
        return keyfiles.key_to_pem(self.key)

    def machine_change(self, machine: Machine) -> MachineChange:
        """Compare the machine that the identity was made on with this one; what cannot be read has not changed."""
        pairs = ((self.record.machine_id, machine.machine_id), (self.record.dmi_uuid, machine.dmi_uuid))
        changed = sum(1 for held, found in pairs if held is not None and found is not None and held != found)
        return (MachineChange.NONE, MachineChange.ONE, MachineChange.BOTH)[changed]


class IdentityStore:
    """The identity under one state folder. Its methods block on fsync; they may be called from any thread."""

    def __init__(self, state_dir: Path, *, disk: Disk | None = None) -> None:
        self.state_dir = state_dir
        self._folder = state_dir / _FOLDER
        self._disk: Disk = LocalDisk() if disk is None else disk
        self._lock = threading.Lock()

    def load(self) -> Identity | None:
        """Return the identity, or None when this node has not joined; refuse one that is damaged, naming the file."""
        with self._lock:
            return self._load()

    def settle(self) -> None:
        """Finish what a crash interrupted, at start: point `current` right and drop what no identity uses."""
        with self._lock:
            identity = self._load()
            if identity is not None:
                self._point_and_prune(identity.record.certificate_serial)

    def pending(self, purpose: Purpose, *, label: str) -> PendingRequest:
        """Return the request in flight for `label` (a join token's hash, a serial), or put a new one on disk.

        A request that was made for another label is dropped: its key may be known elsewhere as somebody else's.
        """
        with self._lock:
            folder = self._folder / purpose.value
            held = self._read_pending(folder, label=label)
            if held is not None:
                return held
            key = certificates.generate_key()
            csr_der = certificates.make_csr(key)
            keyfiles.make_folders(self._disk, self._folder)
            keyfiles.remove_folder_with_files(self._disk, folder)
            files = {KEY_FILE: keyfiles.key_to_pem(key), _REQUEST_FILE: csr_der, _PURPOSE_FILE: label.encode()}
            keyfiles.place_folder(self._disk, folder, files)
            return PendingRequest(key=key, csr_der=csr_der)

    def install(
        self,
        purpose: Purpose,
        request: PendingRequest,
        issued: Issued,
        *,
        machine: Machine,
        replacing: str | None = None,
    ) -> Identity:
        """Make the answer to a pending request the identity, durably, and drop the request.

        `replacing` is the serial by which it was asked for; refused CONFLICT when another identity has come meanwhile.
        """
        with self._lock:
            held = self._load_or_none()
            if replacing is not None and (held is None or held.record.certificate_serial != replacing):
                raise refuse(Reason.CONFLICT, "this node was given another identity meanwhile: that one is kept")
            identity = _identity(request.key, issued, held=held, machine=machine)
            self._place(identity, serving_ca_pem=issued.serving_ca_pem)
            keyfiles.remove_folder_with_files(self._disk, self._folder / purpose.value)
            self._disk.sync_folder(self._folder)
            return identity

    def import_folder(self, folder: Path, *, machine: Machine) -> Identity:
        """Take over the identity that `better-compute nodes provision` made in `folder`, if it is whole."""
        with self._lock:
            record = _read_record(self._disk, folder / IDENTITY_FILE)
            if record is None:
                raise damaged(str(folder / IDENTITY_FILE), "there is no such file: was it made by `nodes provision`?")
            found = _read_identity(self._disk, folder, record)
            carried = _carry_marks(record, found.node, self._load_or_none(), found.trust)
            identity = replace(found, record=replace(carried, machine_id=machine.machine_id, dmi_uuid=machine.dmi_uuid))
            self._place(identity, serving_ca_pem=self._disk.read(folder / SERVING_CA_FILE))
            return identity

    def raise_marks(self, *, applied_generation: int = 0, server_time_ms: int = 0) -> IdentityRecord:
        """Raise what must not go backwards; a lower value changes nothing, and nothing is written then."""
        with self._lock:
            held = self._required().record
            raised = replace(
                held,
                applied_generation=max(held.applied_generation, applied_generation),
                server_time_mark_ms=max(held.server_time_mark_ms, server_time_ms),
            )
            self._write_record(raised, held=held)
            return raised

    def reset_clock(self, *, server_time_ms: int) -> IdentityRecord:
        """Set the server time mark, also backwards: what `bcd clock reset` does, by an operator's hand only."""
        with self._lock:
            held = self._required().record
            record = replace(held, server_time_mark_ms=server_time_ms)
            self._write_record(record, held=held)
            return record

    def adopt(self, machine: Machine) -> IdentityRecord:
        """Let the identity be this machine's from now on."""
        with self._lock:
            held = self._required().record
            adopted = replace(held, machine_id=machine.machine_id, dmi_uuid=machine.dmi_uuid)
            self._write_record(adopted, held=held)
            return adopted

    def take_trust(self, signed: bytes) -> TakenTrust | None:
        """Judge a relayed bundle by what is held at this very moment, and keep it; None when it is not newer.

        The approver set first: a bundle that is on disk without it would not be offered again.
        """
        with self._lock:
            held = self._required()
            taken = trust.take(signed, held=held.trust, approvers=held.record.approvers)
            if taken is not None:
                self._write_record(replace(held.record, approvers=taken.approvers), held=held.record)
                folder = self._folder / held.record.certificate_serial
                keyfiles.replace_file(self._disk, folder / TRUST_FILE, taken.trust.signed)
            return taken

    def _load(self) -> Identity | None:
        record = _read_record(self._disk, self.state_dir / IDENTITY_FILE)
        if record is None:
            return None
        return _read_identity(self._disk, self._folder / record.certificate_serial, record)

    def _load_or_none(self) -> Identity | None:
        """Load what is there to carry its marks over; an identity that is damaged is being replaced right now."""
        try:
            return self._load()
        except Refused:
            return None

    def _required(self) -> Identity:
        identity = self._load()
        if identity is None:
            raise refuse(Reason.NOT_JOINED, f"{self.state_dir} holds no identity: join first, with `bcd join TOKEN`")
        return identity

    def _place(self, identity: Identity, *, serving_ca_pem: bytes | None) -> None:
        serial = identity.record.certificate_serial
        files = {KEY_FILE: identity.key_pem, CHAIN_FILE: identity.chain_pem, TRUST_FILE: identity.trust.signed}
        if serving_ca_pem is not None:
            files[SERVING_CA_FILE] = serving_ca_pem
        keyfiles.make_folders(self._disk, self._folder)
        held = self._load_or_none()
        if held is None or held.record.certificate_serial != serial:
            # What is there was left by a crash before identity.json named it, or is damaged: nobody uses it.
            keyfiles.remove_folder_with_files(self._disk, self._folder / serial)
            keyfiles.place_folder(self._disk, self._folder / serial, files)
        keyfiles.replace_file(self._disk, self.state_dir / IDENTITY_FILE, identity_file.encode(identity.record))
        self._point_and_prune(serial)

    def _point_and_prune(self, serial: str) -> None:
        if self._disk.link_target(self._folder / _CURRENT) != serial:
            keyfiles.replace_link(self._disk, self._folder / _CURRENT, serial)
        kept = {serial, _CURRENT, *(purpose.value for purpose in Purpose)}
        for name in self._disk.names(self._folder):
            if name not in kept:
                if self._disk.is_folder(self._folder / name):
                    keyfiles.remove_folder_with_files(self._disk, self._folder / name)
                else:
                    self._disk.remove(self._folder / name)

    def _write_record(self, record: IdentityRecord, *, held: IdentityRecord) -> None:
        if record != held:
            keyfiles.replace_file(self._disk, self.state_dir / IDENTITY_FILE, identity_file.encode(record))

    def _read_pending(self, folder: Path, *, label: str) -> PendingRequest | None:
        files = [self._disk.read(folder / name) for name in (KEY_FILE, _REQUEST_FILE, _PURPOSE_FILE)]
        key_pem, csr_der, purpose = files
        if key_pem is None or csr_der is None or purpose != label.encode():
            return None
        try:
            key = keyfiles.key_from_pem(key_pem, name=str(folder / KEY_FILE))
            matches = certificates.check_csr(csr_der) == key.public_key()
        except Refused:
            return None
        return PendingRequest(key=key, csr_der=csr_der) if matches else None


def _identity(key: ec.EllipticCurvePrivateKey, issued: Issued, *, held: Identity | None, machine: Machine) -> Identity:
    leaf = certificates.load_certificate(issued.chain_der[0])
    node = identity_of(leaf)
    assert leaf.public_key() == key.public_key(), "whoever verified the answer compared the keys"
    assert node.role is not None, "whoever verified the answer compared the roles"
    record = IdentityRecord(
        certificate_serial=certificates.serial_text(leaf),
        node_id=node.node_id,
        site=node.site,
        trust_domain=node.trust_domain,
        role=node.role,
        identity_generation=issued.identity_generation,
        gateway_urls=issued.gateway_urls,
        server_time_mark_ms=issued.server_time_ms,
        machine_id=machine.machine_id,
        dmi_uuid=machine.dmi_uuid,
    )
    newest = issued.trust if held is None else trust.newer_of(held.trust, issued.trust)
    carried = _carry_marks(record, node, held, newest)
    return Identity(record=carried, node=node, key=key, chain_der=issued.chain_der, trust=newest)


def _carry_marks(record: IdentityRecord, node: NodeIdentity, held: Identity | None, newest: Trust) -> IdentityRecord:
    """Keep the marks of the identity before it when it is the same node's: not even a re-join takes them back.

    The approvers also under another name: whoever holds the control plane can make a re-join necessary, and names it.
    """
    same_domain = held is not None and held.node.trust_domain == node.trust_domain
    approvers, _ = trust.enforced_approvers(held.record.approvers if held and same_domain else NO_APPROVERS, newest)
    record = replace(record, approvers=approvers)
    if held is None or held.node.spiffe_id != node.spiffe_id:
        return record
    return replace(
        record,
        applied_generation=max(record.applied_generation, held.record.applied_generation),
        server_time_mark_ms=max(record.server_time_mark_ms, held.record.server_time_mark_ms),
    )


def _read_identity(disk: Disk, folder: Path, record: IdentityRecord) -> Identity:
    """Read the files that belong to a record and check that they are whole and belong together."""
    chain_pem, key_pem, trust_bundle = (
        _required_file(disk, folder / name) for name in (CHAIN_FILE, KEY_FILE, TRUST_FILE)
    )
    with _naming(folder / CHAIN_FILE):
        chain_der = certificates.chain_from_pem(chain_pem)
        leaf = certificates.load_certificate(chain_der[0])
        node = identity_of(leaf)
    with _naming(folder / KEY_FILE):
        key = keyfiles.key_from_pem(key_pem, name=KEY_FILE)
    with _naming(folder / TRUST_FILE):
        held_trust = trust.read_own(trust_bundle)
    if leaf.public_key() != key.public_key():
        raise damaged(str(folder / KEY_FILE), f"it is not the key of {CHAIN_FILE}")
    said = (record.certificate_serial, record.trust_domain, record.site, record.node_id, record.role)
    found = (certificates.serial_text(leaf), node.trust_domain, node.site, node.node_id, node.role)
    if said != found:
        raise damaged(str(folder / CHAIN_FILE), f"it is not the certificate that {IDENTITY_FILE} describes")
    if held_trust.content.trust_domain != node.trust_domain:
        raise damaged(str(folder / TRUST_FILE), f"it is of another trust domain than {node.trust_domain}")
    return Identity(record=record, node=node, key=key, chain_der=chain_der, trust=held_trust)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what is wrong with a file's content into a sentence that names the file and the cure."""
    try:
        yield
    except Refused as refusal:
        raise damaged(str(path), refusal.message) from refusal


def _required_file(disk: Disk, path: Path) -> bytes:
    data = _read(disk, path)
    if data is None:
        raise damaged(str(path), "there is no such file")
    return data


def _read_record(disk: Disk, path: Path) -> IdentityRecord | None:
    data = _read(disk, path)
    return None if data is None else identity_file.parse(data, path=str(path))


def _read(disk: Disk, path: Path) -> bytes | None:
    try:
        return disk.read(path)
    except OSError as error:
        raise damaged(str(path), error.strerror or "it cannot be read") from error
