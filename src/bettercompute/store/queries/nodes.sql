-- Nodes: what joined, and what people and the control plane say of it.

-- name: nodes.lock_session
-- other: makes joining, renewing and revoking of one node take turns with its Hello
SELECT session_epoch, gateway_id FROM node_sessions WHERE node_id = :node_id FOR NO KEY UPDATE;

-- name: nodes.insert
-- other: a node's first join
INSERT INTO nodes (node_id, site, role, tenant_controlled, attestor, hardware_claims)
VALUES (:node_id, :site, :role, :tenant_controlled, :attestor, :hardware_claims::text::jsonb)
ON CONFLICT (node_id) DO NOTHING
RETURNING identity_generation;

-- name: nodes.insert_session
-- other: the one row per node that gateways own from then on
INSERT INTO node_sessions (node_id) VALUES (:node_id);

-- name: nodes.rejoin
-- other: a node joins again under its id: older certificates end with their generation
UPDATE nodes
   SET identity_generation = identity_generation + 1, site = :site, role = :role, tenant_controlled = :tenant_controlled,
       attestor = :attestor, hardware_claims = :hardware_claims::text::jsonb, joined_at = compute_now(),
       quarantined_at = NULL, quarantine_reason = NULL, revoked_at = NULL, revoked_by = NULL, revoked_reason = NULL,
       standing_changed_at = CASE WHEN revoked_at IS NULL THEN standing_changed_at ELSE compute_now() END
 WHERE node_id = :node_id
RETURNING identity_generation;

-- name: nodes.get
-- other: read
SELECT n.node_id, n.site, n.role, n.tenant_controlled, n.state, n.state_reason,
       to_ms(n.state_changed_at) AS state_changed_at_ms, n.identity_generation, n.attestor,
       n.hardware_claims::text AS hardware_claims, n.spec_generation, n.observed_generation, n.applied_generation,
       to_ms(n.locked_at) AS locked_at_ms, to_ms(n.locked_until) AS locked_until_ms, n.locked_by, n.lock_reason,
       to_ms(n.revoked_at) AS revoked_at_ms, n.revoked_by, n.revoked_reason,
       to_ms(n.quarantined_at) AS quarantined_at_ms, n.quarantine_reason, to_ms(n.joined_at) AS joined_at_ms,
       s.gateway_id, s.session_id, s.session_epoch, s.boot_id, s.journal_id, s.daemon_version, s.proto_max,
       s.trust_version, s.capabilities, s.acked_event_seq, s.cert_serial, s.peer_address, s.upgrade_only, s.signed_only,
       s.heartbeat_interval_ms, to_ms(s.connected_at) AS connected_at_ms, to_ms(s.last_seen) AS last_seen_ms,
       to_ms(s.disconnected_at) AS disconnected_at_ms,
       (SELECT json_object_agg(l.key, l.value ORDER BY l.key)::text FROM node_labels l
         WHERE l.node_id = n.node_id AND l.source = 'system') AS system_labels,
       (SELECT json_object_agg(l.key, l.value ORDER BY l.key)::text FROM node_labels l
         WHERE l.node_id = n.node_id AND l.source = 'operator') AS operator_labels
  FROM nodes n JOIN node_sessions s ON s.node_id = n.node_id
 WHERE n.node_id = ANY (:node_ids::text[])
 ORDER BY n.node_id;

-- name: nodes.choose
-- other: read; the nodes that meet all requirements, in the order of node ids
SELECT n.node_id, n.role, n.state
  FROM nodes n
 WHERE n.node_id > :after
   AND NOT EXISTS (
         SELECT FROM unnest(:keys::text[], :sources::text[], :value_sets::text[], :negations::boolean[])
                     AS wanted (key, source, value_set, negated)
         -- One key of one source has one value, so that this node's labels are probed and no others.
         CROSS JOIN LATERAL (
           SELECT CASE WHEN wanted.source <> 'field'
                       THEN (SELECT l.value FROM node_labels l
                              WHERE l.node_id = n.node_id AND l.source = wanted.source AND l.key = wanted.key)
                       WHEN wanted.key = 'site' THEN n.site
                       WHEN wanted.key = 'role' THEN n.role
                       WHEN wanted.key = 'state' THEN n.state END AS value) held
          WHERE (held.value IS NOT NULL AND (wanted.value_set IS NULL OR wanted.value_set::jsonb ? held.value))
                = wanted.negated)
 ORDER BY n.node_id
 LIMIT :page_size;

-- name: nodes.choose_labelled
-- other: read; the same from among the nodes with one label, found by it
SELECT n.node_id, n.role, n.state
  FROM node_labels carried JOIN nodes n ON n.node_id = carried.node_id
 WHERE carried.key = :label_key AND carried.value = :label_value AND carried.source = :label_source
   AND carried.node_id > :after
   AND NOT EXISTS (
         SELECT FROM unnest(:keys::text[], :sources::text[], :value_sets::text[], :negations::boolean[])
                     AS wanted (key, source, value_set, negated)
         -- One key of one source has one value, so that this node's labels are probed and no others.
         CROSS JOIN LATERAL (
           SELECT CASE WHEN wanted.source <> 'field'
                       THEN (SELECT l.value FROM node_labels l
                              WHERE l.node_id = n.node_id AND l.source = wanted.source AND l.key = wanted.key)
                       WHEN wanted.key = 'site' THEN n.site
                       WHEN wanted.key = 'role' THEN n.role
                       WHEN wanted.key = 'state' THEN n.state END AS value) held
          WHERE (held.value IS NOT NULL AND (wanted.value_set IS NULL OR wanted.value_set::jsonb ? held.value))
                = wanted.negated)
 ORDER BY carried.node_id
 LIMIT :page_size;

-- name: nodes.outside
-- other: read; which of these have not every one of the labels
SELECT asked.node_id FROM unnest(:node_ids::text[]) AS asked (node_id)
 WHERE EXISTS (
         SELECT FROM unnest(:keys::text[], :sources::text[], :label_values::text[]) AS wanted (key, source, value)
          WHERE NOT EXISTS (
                  SELECT FROM node_labels l
                   WHERE l.node_id = asked.node_id AND l.source = wanted.source AND l.key = wanted.key
                     AND l.value = wanted.value))
 ORDER BY asked.node_id;

-- name: nodes.existing
-- other: read
SELECT node_id, role, state FROM nodes WHERE node_id = ANY (:node_ids::text[]) ORDER BY node_id;

-- name: nodes.state_counts
-- other: read
SELECT state, count(*) AS nodes FROM nodes GROUP BY state ORDER BY state;

-- name: nodes.set_labels
-- other: labels of one source, written by whoever owns that source
INSERT INTO node_labels (node_id, source, key, value)
SELECT :node_id, :source, wanted.key, wanted.value
  FROM unnest(:keys::text[], :values::text[]) AS wanted (key, value)
 ORDER BY wanted.key
ON CONFLICT (node_id, source, key) DO UPDATE SET value = excluded.value;

-- name: nodes.remove_labels
-- other: labels of one source, written by whoever owns that source
WITH locked AS (
  SELECT key FROM node_labels
   WHERE node_id = :node_id AND source = :source AND key = ANY (:keys::text[])
   ORDER BY key FOR UPDATE)
DELETE FROM node_labels l USING locked
 WHERE l.node_id = :node_id AND l.source = :source AND l.key = locked.key;

-- name: nodes.count_labels
-- other: read
SELECT count(*) AS labels FROM node_labels WHERE node_id = :node_id;
