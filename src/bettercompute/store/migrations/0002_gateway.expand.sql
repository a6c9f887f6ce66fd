-- What the gateway's statements stand on: the lease as one rule, where a session came from, and indexes for its polls.

-- Whether a gateway may write: read without a lock, since a lock here would delay the renewal. The 3 s are what a
-- statement may take from here to its commit before the lease could be somebody else's business.
CREATE FUNCTION holds_lease(gateway text, lease_token text) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
  AS $$ SELECT EXISTS (
    SELECT FROM leases
    WHERE name = gateway AND token = lease_token AND retired_at IS NULL
      AND expires_at > compute_now() + interval '3 seconds') $$;

-- The address that the present session came from: both clones are told of each other.
ALTER TABLE node_sessions ADD COLUMN peer_address text;
COMMENT ON COLUMN node_sessions.recent_boots IS
  'The last 8 changes of boot id, oldest first: [{"boot_id", "seen_ms", "forked"}].';

-- The last status report of a node, whole: sections, instances, pressure.
CREATE TABLE node_status (
  node_id      text PRIMARY KEY REFERENCES nodes ON DELETE CASCADE,
  report       bytea NOT NULL CHECK (octet_length(report) <= 5242880),
  received_at  timestamptz NOT NULL DEFAULT compute_now()
) WITH (fillfactor = 70);

CREATE INDEX commands_cancel_requested ON commands (node_id) WHERE cancel_requested_at IS NOT NULL AND state IN (2, 3, 4);
CREATE INDEX nodes_spec_updated ON nodes (spec_updated_at) WHERE spec_updated_at IS NOT NULL;
CREATE INDEX commands_finished ON commands (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX outbox_created ON outbox (created_at);
CREATE INDEX node_events_received ON node_events (received_at);
