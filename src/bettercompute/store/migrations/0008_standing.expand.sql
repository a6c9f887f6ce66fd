-- What operators have said of a node. A lock without an end has no locked_until. Gateways follow both by the time of the
-- last change, and read all that bar a node once a minute.
ALTER TABLE nodes DROP CONSTRAINT nodes_check2;
ALTER TABLE nodes
  ADD COLUMN locked_at timestamptz,
  ADD COLUMN revoked_at timestamptz,
  ADD COLUMN revoked_by text COLLATE "C",
  ADD COLUMN revoked_reason text,
  ADD COLUMN standing_changed_at timestamptz,
  ADD CONSTRAINT nodes_lock CHECK (
    (locked_at IS NULL) = (locked_by IS NULL) AND (locked_at IS NULL) = (lock_reason IS NULL)
    AND (locked_until IS NULL OR locked_at IS NOT NULL)),
  ADD CONSTRAINT nodes_revocation CHECK (
    (revoked_at IS NULL) = (revoked_by IS NULL) AND (revoked_at IS NULL) = (revoked_reason IS NULL));
CREATE INDEX nodes_standing_changed ON nodes (standing_changed_at) WHERE standing_changed_at IS NOT NULL;
CREATE INDEX nodes_barred ON nodes (node_id) WHERE locked_at IS NOT NULL OR revoked_at IS NOT NULL;

-- A revoked certificate outlives a node that is forgotten: nobody comes back by it under a node id that is given anew.
ALTER TABLE node_certs DROP CONSTRAINT node_certs_node_id_fkey;

-- What `doctor` asks: nodes that are away, certificates that nobody has replaced, and what gateways say of themselves.
CREATE INDEX nodes_away ON nodes (node_id) WHERE state IN ('disconnected', 'unreachable');
CREATE INDEX nodes_quarantined ON nodes (node_id) WHERE quarantined_at IS NOT NULL;
CREATE INDEX node_certs_in_use ON node_certs (not_after) WHERE superseded_at IS NULL AND revoked_at IS NULL;
CREATE INDEX node_conditions_true ON node_conditions (type, node_id) WHERE status = 'true';
ALTER TABLE leases
  -- The gateway's own clock less the database's at the last renewal.
  ADD COLUMN clock_offset_ms bigint,
  -- How old its picture of the revocations was then.
  ADD COLUMN revocations_age_ms bigint,
  -- Until when its serving certificate is good.
  ADD COLUMN serving_not_after timestamptz;
