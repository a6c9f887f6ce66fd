-- What the trust bundle is made of: the keys of the installation with their place in a rotation, the approver sets, and
-- the batches that wait for approvals.
CREATE TABLE trust_keys (
  purpose        text COLLATE "C" NOT NULL CHECK (purpose IN ('command-root', 'join-signing', 'serving-ca', 'node-ca')),
  key_sha256     text COLLATE "C" NOT NULL CHECK (key_sha256 ~ '^[0-9a-f]{64}$'),
  -- A certificate for CAs and roots, a SubjectPublicKeyInfo for the join-signing key.
  public_der     bytea NOT NULL,
  -- The join-encryption key beside the join-signing one: they are rotated together. Else empty.
  companion_der  bytea NOT NULL DEFAULT '',
  stage          text COLLATE "C" NOT NULL CHECK (stage IN ('next', 'current', 'previous', 'retired')),
  -- The first trust bundle that lists it; 0: none does yet, or none ever will (node-ca).
  first_version  bigint NOT NULL DEFAULT 0 CHECK (first_version >= 0),
  changed_at     timestamptz NOT NULL DEFAULT compute_now(),
  changed_by     text COLLATE "C" NOT NULL,
  PRIMARY KEY (purpose, key_sha256)
);
CREATE UNIQUE INDEX trust_keys_current ON trust_keys (purpose) WHERE stage = 'current';
CREATE UNIQUE INDEX trust_keys_next ON trust_keys (purpose) WHERE stage = 'next';

-- Under which command root a signature was made (the SHA-256 of its key): a root is retired once nothing needs it.
ALTER TABLE commands ADD COLUMN signed_under text COLLATE "C";
ALTER TABLE nodes ADD COLUMN spec_signed_under text COLLATE "C";
CREATE INDEX nodes_spec_signed_under ON nodes (spec_signed_under, node_id) WHERE spec_signed_under IS NOT NULL;

CREATE TABLE approver_sets (
  epoch               bigint PRIMARY KEY CHECK (epoch > 0),
  -- Public keys as SubjectPublicKeyInfo in DER, in canonical order; none: the quorum is given up.
  approver_keys       bytea[] NOT NULL,
  threshold           integer NOT NULL CHECK (threshold >= 0),
  tiers               integer[] NOT NULL,
  unbatched_per_hour  integer NOT NULL CHECK (unbatched_per_hour >= 0),
  -- What people call the keys: {kid: name}.
  names               jsonb NOT NULL DEFAULT '{}',
  -- Serialized Signatures over the set, of approvers of the sets before it.
  signatures          bytea[] NOT NULL DEFAULT '{}',
  state               text COLLATE "C" NOT NULL CHECK (state IN ('proposed', 'current', 'replaced', 'withdrawn')),
  proposed_at         timestamptz NOT NULL DEFAULT compute_now(),
  proposed_by         text COLLATE "C" NOT NULL,
  why                 text COLLATE "C" NOT NULL DEFAULT '',
  decided_at          timestamptz,
  CHECK ((cardinality(approver_keys) = 0) = (threshold = 0))
);
CREATE UNIQUE INDEX approver_sets_current ON approver_sets (state) WHERE state = 'current';
CREATE UNIQUE INDEX approver_sets_proposed ON approver_sets (state) WHERE state = 'proposed';

-- A run of a destructive kind that approvers must agree to. Its commands wait with not_before = not_after, which lets
-- dispatch send them at no time, also a gateway of the release before.
CREATE TABLE approval_batches (
  batch_id     text COLLATE "C" PRIMARY KEY,
  kind         text COLLATE "C" NOT NULL,
  scope_root   bytea NOT NULL CHECK (octet_length(scope_root) = 32),
  scope_size   integer NOT NULL CHECK (scope_size > 0),
  not_after    timestamptz NOT NULL,
  trust_domain text COLLATE "C" NOT NULL,
  state        text COLLATE "C" NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'approved', 'refused')),
  asked_by     text COLLATE "C" NOT NULL,
  asked_at     timestamptz NOT NULL DEFAULT compute_now(),
  -- Serialized Signatures over the batch, one of each approver.
  signatures   bytea[] NOT NULL DEFAULT '{}',
  decided_at   timestamptz,
  decided_by   text COLLATE "C",
  why          text COLLATE "C" NOT NULL DEFAULT '',
  CHECK ((state = 'waiting') = (decided_at IS NULL))
);
CREATE INDEX approval_batches_waiting ON approval_batches (not_after) WHERE state = 'waiting';
