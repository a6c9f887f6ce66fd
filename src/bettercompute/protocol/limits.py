"""Every bound of the protocol in one place, each with its reason (docs/protocol.md, "Message size bounds").

Both sides apply them before parsing. Bulk data never rides the session: logs go to a presigned address, images come
from one. Where a bound follows from others, an assertion beside it says so.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB


# A serialized CommandBody, a command's payload, a command's result: work orders and findings, not data.
MAX_COMMAND_BODY_BYTES = 1 * MIB
# A serialized DesiredStateBody: the whole spec of a host with hundreds of instances.
MAX_SPEC_BODY_BYTES = 4 * MIB
# One Session or Tunnel frame, and every gRPC message that a gateway reads.
MAX_FRAME_BYTES = 5 * MIB
# A Hello: the oldest results that fit ride along, the others follow as updates, so that a herd's Hellos stay small.
MAX_HELLO_BYTES = 1 * MIB
# A JoinRequest or RenewRequest: a CSR, a certificate chain and evidence. Anybody may send one, so it is small.
MAX_JOIN_BYTES = 64 * KIB
# A serialized TrustBundle: bounded when it is published, so that every Welcome can carry it.
MAX_TRUST_BUNDLE_BYTES = 256 * KIB
# One inventory section in canonical encoding: a host with thousands of PCI functions stays below a tenth of it.
MAX_INVENTORY_SECTION_BYTES = 1 * MIB
# Events of one batch, serialized.
MAX_EVENT_BATCH_BYTES = 512 * KIB
# An event's payload_json. A batch of one must fit.
MAX_EVENT_PAYLOAD_BYTES = 16 * KIB
# Objects and arrays in an event's payload: nesting deeper than a parser's stack cannot come of so few.
MAX_EVENT_CONTAINERS = 500
# A piece of a running command's output, and what the control plane keeps of it: the last ones.
MAX_OUTPUT_BYTES = 64 * KIB

assert MAX_COMMAND_BODY_BYTES < MAX_SPEC_BODY_BYTES < MAX_FRAME_BYTES, "a frame holds a body and its signature"
assert MAX_HELLO_BYTES < MAX_FRAME_BYTES, "a Hello is a frame"
assert MAX_TRUST_BUNDLE_BYTES < MAX_FRAME_BYTES, "a Welcome carries a trust bundle"
assert MAX_INVENTORY_SECTION_BYTES < MAX_FRAME_BYTES, "a section is sent in one frame"
assert MAX_EVENT_PAYLOAD_BYTES < MAX_EVENT_BATCH_BYTES, "one event always fits a batch"


MAX_EVENTS_PER_BATCH = 500
# Results that a node owes and that are not yet acked; at the bound it answers BUSY.
MAX_DONE_RESULTS = 10_000
# More than any daemon runs: credits are 10, and a gateway may once have given more.
MAX_RUNNING_COMMANDS = 1_000
MAX_UPDATES_PER_BATCH = 1_000
MAX_INVENTORY_SECTIONS = 32
MAX_CONDITIONS = 64
# Kinds of refusals that a daemon counts: what was relayed, by reason. There are some thirty.
MAX_RELAY_REFUSALS = 64
MAX_LABELS = 256
MAX_CAPABILITIES = 64
MAX_DRIVERS = 64
MAX_SPEC_SECTIONS = 64
# Instances of a host in one report.
MAX_INSTANCES = 4_096
# Unknown machines that one site agent reports.
MAX_DISCOVERED = 1_024
# Certificates from a leaf to its root, both included.
MAX_CHAIN_CERTIFICATES = 8
MAX_CERTIFICATE_BYTES = 16 * KIB
# Addresses of one instance.
MAX_ADDRESSES = 64
# Well-formed or not: what is kept of them is bounded by MAX_CAPABILITIES.
MAX_CLAIMED_CAPABILITIES = 4_096
# Lanes of one heartbeat: the two there are, and room for later ones.
MAX_LANES = 16


# Ids, reason codes, versions, names: what ends in an index or a label.
MAX_NAME_CHARS = 256
# A sentence for people.
MAX_SENTENCE_CHARS = 4 * KIB
# A reference or a URL.
MAX_REFERENCE_CHARS = 8 * KIB
# A `grpc-message` after percent-encoding: trailers share a header list of 16 KiB with everything else.
MAX_GRPC_MESSAGE_BYTES = 4 * KIB


# What a PostgreSQL integer and a bigint hold; the wire's uint32 and uint64 reach twice as far.
MAX_INTEGER = 2**31 - 1
MAX_BIGINT = 2**63 - 1
# The last millisecond of the year 9999: later ones are no timestamptz that every client can read.
MAX_TIME_MS = 253_402_300_799_999
HELLO_NONCE_BYTES = 16
SHA256_BYTES = 32
# An uncompressed P-256 point: 0x04, x, y.
EPK_BYTES = 65
# r || s of ES256.
SIGNATURE_BYTES = 64


# Commands of a lane in flight per node. Control is short and local; bulk is what a disk or a link bears at once.
CONTROL_CREDITS = 8
BULK_CREDITS = 2


# `not_after` when nobody says otherwise, and at most: a command never waits for a node that is gone for good.
DEFAULT_NOT_AFTER_MS = 24 * 3_600_000
MAX_NOT_AFTER_MS = 7 * 24 * 3_600_000
# The longest that a pushback makes a daemon wait.
MAX_PUSHBACK_MS = 15 * 60_000
# A timeout longer than a delivery deadline can be is a mistake.
MAX_TIMEOUT_MS = MAX_NOT_AFTER_MS


# Frames queued towards one peer; over either bound the stream is closed, `slow-consumer`.
MAX_QUEUED_BYTES = 8 * MIB
MAX_QUEUED_FRAMES = 1_024

assert MAX_FRAME_BYTES <= MAX_QUEUED_BYTES, "one frame always fits the queue"
