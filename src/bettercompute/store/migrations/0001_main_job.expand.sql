-- The main job: nodes and their certificates, sessions, commands, events, inventory, and what serves them.
-- Times are timestamptz here and whole milliseconds everywhere else (to_ms, at_ms). Text compares by bytes ("C"),
-- whatever the database was made with: pages and locks have one order. Hot tables leave room for updates inside a page.
-- Foreign keys stand where rows are rare; the rows of hot paths carry the node id and no key.

-- The only clock of record (decisions 0032). Tests replace this function to move it.
CREATE FUNCTION compute_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
  AS $$ SELECT statement_timestamp() $$;

CREATE FUNCTION to_ms(moment timestamptz) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
  AS $$ SELECT floor(extract(epoch FROM moment) * 1000)::bigint $$;

CREATE FUNCTION at_ms(unix_ms bigint) RETURNS timestamptz LANGUAGE sql IMMUTABLE PARALLEL SAFE
  AS $$ SELECT to_timestamp(unix_ms / 1000.0::double precision) $$;

CREATE FUNCTION ms(duration_ms bigint) RETURNS interval LANGUAGE sql IMMUTABLE PARALLEL SAFE
  AS $$ SELECT duration_ms * interval '1 millisecond' $$;

CREATE TABLE nodes (
  node_id              text COLLATE "C" PRIMARY KEY CHECK (node_id ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
  site                 text COLLATE "C" NOT NULL,
  role                 text COLLATE "C" NOT NULL CHECK (role IN ('node', 'site', 'ramdisk')),
  tenant_controlled    boolean NOT NULL DEFAULT false,
  -- The transitions that Hello, closing and the liveness controller make; `joined` until the first Hello.
  state                text COLLATE "C" NOT NULL DEFAULT 'joined' CHECK (state IN ('joined', 'connected', 'disconnected', 'unreachable')),
  state_reason         text COLLATE "C" NOT NULL DEFAULT '',
  state_changed_at     timestamptz NOT NULL DEFAULT compute_now(),
  -- Certificates of an older identity generation are refused: a re-join raises it.
  identity_generation  integer NOT NULL DEFAULT 1 CHECK (identity_generation >= 1),
  attestor             text COLLATE "C" NOT NULL,
  hardware_claims      jsonb NOT NULL DEFAULT '{}',
  spec_generation      bigint NOT NULL DEFAULT 0 CHECK (spec_generation >= 0),
  spec_body            bytea CHECK (octet_length(spec_body) <= 4194304),
  spec_sha256          bytea CHECK (octet_length(spec_sha256) = 32),
  spec_signature       bytea,
  spec_updated_at      timestamptz,
  observed_generation  bigint NOT NULL DEFAULT 0 CHECK (observed_generation >= 0),
  applied_generation   bigint NOT NULL DEFAULT 0 CHECK (applied_generation >= 0),
  locked_until         timestamptz,
  locked_by            text COLLATE "C",
  lock_reason          text COLLATE "C",
  quarantined_at       timestamptz,
  quarantine_reason    text COLLATE "C",
  joined_at            timestamptz NOT NULL DEFAULT compute_now(),
  CHECK ((spec_generation = 0) = (spec_body IS NULL)),
  CHECK ((spec_body IS NULL) = (spec_sha256 IS NULL)),
  CHECK ((locked_until IS NULL) = (locked_by IS NULL)),
  CHECK ((quarantined_at IS NULL) = (quarantine_reason IS NULL))
) WITH (fillfactor = 70);
CREATE INDEX nodes_disconnected ON nodes (state_changed_at) WHERE state = 'disconnected';

CREATE TABLE node_labels (
  node_id  text COLLATE "C" NOT NULL REFERENCES nodes ON DELETE CASCADE,
  source   text COLLATE "C" NOT NULL CHECK (source IN ('system', 'operator')),
  key      text COLLATE "C" NOT NULL CHECK (key <> '' AND octet_length(key) <= 317),
  value    text COLLATE "C" NOT NULL CHECK (octet_length(value) <= 256),
  -- An operator's label of the same name does not stand in for a system one: both may exist.
  PRIMARY KEY (node_id, source, key)
);
CREATE INDEX node_labels_selector ON node_labels (key, value, node_id);

CREATE TABLE node_sessions (
  node_id                text COLLATE "C" PRIMARY KEY REFERENCES nodes ON DELETE CASCADE,
  gateway_id             text COLLATE "C",
  session_id             text COLLATE "C",
  session_epoch          bigint NOT NULL DEFAULT 0 CHECK (session_epoch >= 0),
  boot_id                text COLLATE "C",
  -- The last 8 changes of boot id, oldest first: [{"boot_id", "seen_ms", "forked"}].
  recent_boots           jsonb NOT NULL DEFAULT '[]' CHECK (jsonb_array_length(recent_boots) <= 8),
  journal_id             text COLLATE "C",
  hello_nonce            bytea,
  role                   text COLLATE "C",
  daemon_version         text COLLATE "C",
  proto_max              integer,
  trust_version          bigint NOT NULL DEFAULT 0,
  capabilities           text[] NOT NULL DEFAULT '{}' CHECK (cardinality(capabilities) <= 64),
  approver_set_epoch     bigint,
  approver_set_sha256    bytea,
  acked_event_seq        bigint NOT NULL DEFAULT 0 CHECK (acked_event_seq >= 0),
  cert_serial            text COLLATE "C",
  upgrade_only           boolean NOT NULL DEFAULT false,
  signed_only            boolean NOT NULL DEFAULT false,
  heartbeat_interval_ms  integer NOT NULL DEFAULT 10000 CHECK (heartbeat_interval_ms > 0),
  duplicate_hellos       integer NOT NULL DEFAULT 0 CHECK (duplicate_hellos >= 0),
  duplicate_since        timestamptz,
  connected_at           timestamptz,
  last_seen              timestamptz,
  disconnected_at        timestamptz,
  CHECK (gateway_id IS NULL OR disconnected_at IS NULL),
  CHECK (gateway_id IS NULL OR (session_id IS NOT NULL AND session_epoch > 0 AND last_seen IS NOT NULL)),
  CHECK ((approver_set_epoch IS NULL) = (approver_set_sha256 IS NULL))
) WITH (fillfactor = 70);
-- None on last_seen: the liveness flush stays a heap-only update.
CREATE INDEX node_sessions_gateway ON node_sessions (gateway_id) WHERE gateway_id IS NOT NULL;

CREATE TABLE node_certs (
  serial               text COLLATE "C" PRIMARY KEY CHECK (serial ~ '^[0-9a-f]+$'),
  node_id              text COLLATE "C" NOT NULL REFERENCES nodes ON DELETE CASCADE,
  identity_generation  integer NOT NULL,
  csr_sha256           bytea NOT NULL CHECK (octet_length(csr_sha256) = 32),
  -- What Join or Renew answered, byte by byte, so that the same request gets the same answer.
  chain                bytea NOT NULL,
  not_before           timestamptz NOT NULL,
  not_after            timestamptz NOT NULL,
  issued_at            timestamptz NOT NULL DEFAULT compute_now(),
  -- NULL: every kind of the role.
  allowed_kinds        text[],
  -- Set by the first committed Hello; then the serials before it are superseded.
  first_used_at        timestamptz,
  superseded_at        timestamptz,
  revoked_at           timestamptz,
  revocation_reason    text COLLATE "C",
  UNIQUE (node_id, csr_sha256),
  CHECK (not_after > not_before),
  CHECK ((revoked_at IS NULL) = (revocation_reason IS NULL))
);
CREATE INDEX node_certs_revocations ON node_certs (revoked_at) WHERE revoked_at IS NOT NULL;
CREATE INDEX node_certs_expiry ON node_certs (not_after);

CREATE TABLE join_tokens (
  token_id           text COLLATE "C" PRIMARY KEY,
  secret_sha256      bytea NOT NULL UNIQUE CHECK (octet_length(secret_sha256) = 32),
  site               text COLLATE "C" NOT NULL,
  role               text COLLATE "C" NOT NULL CHECK (role IN ('node', 'site', 'ramdisk')),
  tenant_controlled  boolean NOT NULL DEFAULT false,
  -- Fixed by the token, or drawn when it is redeemed.
  node_id            text COLLATE "C",
  allowed_kinds      text[],
  expires_at         timestamptz NOT NULL,
  created_at         timestamptz NOT NULL DEFAULT compute_now(),
  created_by         text COLLATE "C" NOT NULL,
  used_at            timestamptz,
  used_csr_sha256    bytea,
  used_node_id       text COLLATE "C",
  used_source        text COLLATE "C",
  revoked_at         timestamptz,
  revoked_by         text COLLATE "C",
  CHECK ((used_at IS NULL) = (used_csr_sha256 IS NULL) AND (used_at IS NULL) = (used_node_id IS NULL)),
  CHECK ((revoked_at IS NULL) = (revoked_by IS NULL))
);

-- The place in the node's order is part of the signed body, so it is drawn before the row is written.
CREATE SEQUENCE commands_seq AS bigint;

CREATE TABLE commands (
  id                   text COLLATE "C" PRIMARY KEY CHECK (octet_length(id) BETWEEN 1 AND 64),
  node_id              text COLLATE "C" NOT NULL,
  kind                 text COLLATE "C" NOT NULL,
  lane                 smallint NOT NULL CHECK (lane > 0),
  seq                  bigint NOT NULL DEFAULT nextval('commands_seq'),
  batch_id             text COLLATE "C",
  body                 bytea NOT NULL CHECK (octet_length(body) <= 1048576),
  signature            bytea,
  batch_approval       bytea,
  batch_proof          bytea,
  -- What people see of the payload; secrets are references in it, never values.
  payload              jsonb NOT NULL DEFAULT '{}',
  -- common.v1 CommandState: pending 1, dispatched 2, acked 3, running 4, succeeded 5, failed 6, cancelled 7, expired 8.
  state                smallint NOT NULL DEFAULT 1 CHECK (state BETWEEN 1 AND 8),
  created_at           timestamptz NOT NULL DEFAULT compute_now(),
  created_by           text COLLATE "C" NOT NULL,
  not_before           timestamptz,
  not_after            timestamptz NOT NULL,
  timeout_ms           bigint NOT NULL CHECK (timeout_ms > 0),
  session_epoch        bigint,
  session_id           text COLLATE "C",
  attempt              integer NOT NULL DEFAULT 0 CHECK (attempt >= 0),
  busy_count           integer NOT NULL DEFAULT 0 CHECK (busy_count >= 0),
  sent_boot_id         text COLLATE "C",
  cancel_requested_at  timestamptz,
  cancel_requested_by  text COLLATE "C",
  cancel_reason        text COLLATE "C",
  dispatched_at        timestamptz,
  acked_at             timestamptz,
  running_at           timestamptz,
  -- When the effect began, as the daemon tells it.
  started_at           timestamptz,
  finished_at          timestamptz,
  progress             bytea,
  reason               text COLLATE "C" NOT NULL DEFAULT '',
  message              text COLLATE "C" NOT NULL DEFAULT '',
  result               bytea CHECK (octet_length(result) <= 1048576),
  update_signature     bytea,
  -- Reported over a session whose frames a proxy could have written.
  unauthenticated      boolean NOT NULL DEFAULT false,
  CHECK ((state >= 5) = (finished_at IS NOT NULL)),
  CHECK (state <> 1 OR (session_epoch IS NULL AND session_id IS NULL)),
  CHECK (state <> 2 OR (session_epoch IS NOT NULL AND session_id IS NOT NULL AND attempt > 0 AND dispatched_at IS NOT NULL)),
  CHECK ((cancel_requested_at IS NULL) = (cancel_requested_by IS NULL)),
  CHECK (result IS NULL OR state >= 5)
) WITH (fillfactor = 85);
CREATE INDEX commands_pending ON commands (node_id, lane, seq) WHERE state = 1;
CREATE INDEX commands_in_flight ON commands (node_id, seq) WHERE state IN (2, 3, 4);
CREATE INDEX commands_deadline ON commands (not_after) WHERE state = 1;
CREATE INDEX commands_node ON commands (node_id, id);
CREATE INDEX commands_batch ON commands (batch_id, id) WHERE batch_id IS NOT NULL;

-- Live output in pieces; dropped bytes will never come.
CREATE TABLE command_output (
  command_id     text COLLATE "C" NOT NULL,
  output_offset  bigint NOT NULL CHECK (output_offset >= 0),
  node_id        text COLLATE "C" NOT NULL,
  data           bytea NOT NULL,
  dropped_bytes  bigint NOT NULL DEFAULT 0 CHECK (dropped_bytes >= 0),
  received_at    timestamptz NOT NULL DEFAULT compute_now(),
  PRIMARY KEY (command_id, output_offset)
);

CREATE TABLE node_events (
  node_id      text COLLATE "C" NOT NULL,
  journal_id   text COLLATE "C" NOT NULL,
  seq          bigint NOT NULL CHECK (seq > 0),
  -- Drawn at the event's birth; survives a rollback of the journal, which its seq does not.
  event_id     text COLLATE "C" NOT NULL,
  type         text COLLATE "C" NOT NULL,
  occurred_at  timestamptz NOT NULL,
  received_at  timestamptz NOT NULL DEFAULT compute_now(),
  recovered    boolean NOT NULL DEFAULT false,
  -- JSON as the daemon wrote it: bytes, because jsonb and text refuse what JSON allows (\u0000).
  payload      bytea NOT NULL,
  PRIMARY KEY (node_id, journal_id, seq),
  UNIQUE (node_id, event_id)
);

CREATE TABLE node_event_gaps (
  node_id     text COLLATE "C" NOT NULL,
  journal_id  text COLLATE "C" NOT NULL,
  first_seq   bigint NOT NULL,
  last_seq    bigint NOT NULL,
  noticed_at  timestamptz NOT NULL DEFAULT compute_now(),
  PRIMARY KEY (node_id, journal_id, first_seq),
  CHECK (last_seq >= first_seq AND first_seq > 0)
);

CREATE TABLE node_conditions (
  node_id     text COLLATE "C" NOT NULL REFERENCES nodes ON DELETE CASCADE,
  type        text COLLATE "C" NOT NULL,
  source      text COLLATE "C" NOT NULL CHECK (source IN ('daemon', 'inventory', 'gateway', 'controller')),
  status      text COLLATE "C" NOT NULL CHECK (status IN ('true', 'false', 'unknown')),
  reason      text COLLATE "C" NOT NULL DEFAULT '',
  message     text COLLATE "C" NOT NULL DEFAULT '',
  changed_at  timestamptz NOT NULL DEFAULT compute_now(),
  updated_at  timestamptz NOT NULL DEFAULT compute_now(),
  PRIMARY KEY (node_id, type)
);

CREATE TABLE inventory_hashes (
  node_id      text COLLATE "C" NOT NULL REFERENCES nodes ON DELETE CASCADE,
  section      text COLLATE "C" NOT NULL,
  sha256       bytea NOT NULL CHECK (octet_length(sha256) = 32),
  reported_at  timestamptz NOT NULL DEFAULT compute_now(),
  PRIMARY KEY (node_id, section)
);

CREATE TABLE inventory_sections (
  node_id      text COLLATE "C" NOT NULL REFERENCES nodes ON DELETE CASCADE,
  section      text COLLATE "C" NOT NULL,
  sha256       bytea NOT NULL CHECK (octet_length(sha256) = 32),
  body         bytea NOT NULL CHECK (octet_length(body) <= 1048576),
  collected_at timestamptz,
  received_at  timestamptz NOT NULL DEFAULT compute_now(),
  PRIMARY KEY (node_id, section)
);

CREATE TABLE outbox (
  id          text COLLATE "C" PRIMARY KEY,
  type        text COLLATE "C" NOT NULL,
  node_id     text COLLATE "C",
  payload     jsonb NOT NULL,
  created_at  timestamptz NOT NULL DEFAULT compute_now(),
  -- Given by the publisher after the commit: the order of the stream.
  position    bigint UNIQUE CHECK (position > 0)
);
CREATE INDEX outbox_unpublished ON outbox (id) WHERE position IS NULL;

-- One row: its lock makes the publisher one, its value the next position.
CREATE TABLE outbox_publisher (
  only_row       boolean PRIMARY KEY DEFAULT true CHECK (only_row),
  last_position  bigint NOT NULL CHECK (last_position >= 0)
);
INSERT INTO outbox_publisher (last_position) VALUES (0);

CREATE TABLE leases (
  name           text COLLATE "C" PRIMARY KEY,
  token          text COLLATE "C" NOT NULL,
  expires_at     timestamptz NOT NULL,
  advertise_url  text COLLATE "C" NOT NULL,
  internal_url   text COLLATE "C" NOT NULL,
  version        text COLLATE "C" NOT NULL,
  stream_count   integer NOT NULL DEFAULT 0 CHECK (stream_count >= 0),
  stream_limit   integer NOT NULL CHECK (stream_limit > 0),
  draining       boolean NOT NULL DEFAULT false,
  started_at     timestamptz NOT NULL DEFAULT compute_now(),
  renewed_at     timestamptz NOT NULL DEFAULT compute_now(),
  retired_at     timestamptz
) WITH (fillfactor = 50);

CREATE TABLE trust_bundles (
  version         bigint PRIMARY KEY CHECK (version > 0),
  -- Of the content without its version: an unchanged content is not published again.
  content_sha256  bytea NOT NULL CHECK (octet_length(content_sha256) = 32),
  signed_bundle   bytea NOT NULL,
  created_at      timestamptz NOT NULL DEFAULT compute_now()
);

CREATE TABLE audit_log (
  id       text COLLATE "C" PRIMARY KEY,
  at       timestamptz NOT NULL DEFAULT compute_now(),
  actor    text COLLATE "C" NOT NULL,
  action   text COLLATE "C" NOT NULL,
  target   text COLLATE "C" NOT NULL,
  why      text COLLATE "C" NOT NULL DEFAULT '',
  outcome  text COLLATE "C" NOT NULL,
  details  jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX audit_log_target ON audit_log (target, id);

CREATE TABLE api_tokens (
  token_id      text COLLATE "C" PRIMARY KEY,
  name          text COLLATE "C" NOT NULL UNIQUE,
  sha256        bytea NOT NULL UNIQUE CHECK (octet_length(sha256) = 32),
  role          text COLLATE "C" NOT NULL CHECK (role IN ('viewer', 'operator', 'admin')),
  -- NULL: every node; else the labels a node must carry.
  label_scope   jsonb,
  created_at    timestamptz NOT NULL DEFAULT compute_now(),
  created_by    text COLLATE "C" NOT NULL,
  expires_at    timestamptz,
  revoked_at    timestamptz
);

CREATE TABLE idempotency_keys (
  principal       text COLLATE "C" NOT NULL,
  key             text COLLATE "C" NOT NULL CHECK (octet_length(key) BETWEEN 1 AND 255),
  request_sha256  bytea NOT NULL CHECK (octet_length(request_sha256) = 32),
  response        jsonb NOT NULL,
  created_at      timestamptz NOT NULL DEFAULT compute_now(),
  PRIMARY KEY (principal, key)
);
CREATE INDEX idempotency_keys_created ON idempotency_keys (created_at);

-- What may be used once: proofs of possession, tickets. Kept until expiry, across gateways and restarts.
CREATE TABLE replay_cache (
  purpose     text COLLATE "C" NOT NULL,
  jti         text COLLATE "C" NOT NULL,
  expires_at  timestamptz NOT NULL,
  PRIMARY KEY (purpose, jti)
);
CREATE INDEX replay_cache_expiry ON replay_cache (expires_at);

-- When each controller last finished a run: the liveness controller grants grace after a pause of its own.
CREATE TABLE controller_runs (
  name         text COLLATE "C" PRIMARY KEY,
  holder       text COLLATE "C" NOT NULL,
  ran_at       timestamptz NOT NULL,
  grace_until  timestamptz
) WITH (fillfactor = 50);
