-- The transitions that nobody reports, made by the Liveness controller. None releases anything.

-- name: liveness.overdue
-- other: read; connected nodes whose gateway is lost or that have not been seen for the shortest time that can matter
SELECT s.node_id, s.gateway_id, s.session_id, s.session_epoch, to_ms(s.last_seen) AS last_seen_ms,
  s.heartbeat_interval_ms, to_ms(compute_now()) - to_ms(s.last_seen) AS last_seen_age_ms,
  CASE WHEN l.name IS NULL THEN 9223372036854775807
       WHEN l.expires_at < compute_now() THEN to_ms(compute_now()) - to_ms(l.expires_at) END AS lease_expired_ms
FROM node_sessions s LEFT JOIN leases l ON l.name = s.gateway_id
WHERE s.gateway_id IS NOT NULL AND s.node_id > :after
  AND (l.name IS NULL OR l.expires_at < compute_now() - ms(:lost_after_ms)
       OR s.last_seen < compute_now() - ms(:stale_after_ms))
ORDER BY s.node_id
LIMIT :page_size;

-- name: liveness.long_disconnected
-- other: read; nodes that have been disconnected for long
SELECT s.node_id, s.session_id, s.session_epoch, to_ms(compute_now()) - to_ms(n.state_changed_at) AS disconnected_age_ms
FROM nodes n JOIN node_sessions s ON s.node_id = n.node_id
WHERE n.state = 'disconnected' AND n.state_changed_at < compute_now() - ms(:unreachable_after_ms)
  AND s.gateway_id IS NULL
ORDER BY n.state_changed_at
LIMIT :page_size;

-- name: liveness.mark_disconnected
-- other: no gateway writes this; the row must be exactly as it was read, gateway, session, epoch and last_seen
WITH said AS MATERIALIZED (
  SELECT u.* FROM unnest(:node_ids::text[], :gateway_ids::text[], :session_ids::text[], :session_epochs::bigint[],
    :last_seens_ms::bigint[], :reasons::text[], :outbox_ids::text[], :outbox_payloads::text[])
    AS u (node_id, gateway_id, session_id, session_epoch, last_seen_ms, reason, outbox_id, outbox_payload)
), locked AS MATERIALIZED (
  -- Whoever has been seen since, or said Hello elsewhere, is left alone.
  SELECT said.* FROM node_sessions s JOIN said ON said.node_id = s.node_id
  WHERE s.gateway_id = said.gateway_id AND s.session_id = said.session_id AND s.session_epoch = said.session_epoch
    AND to_ms(s.last_seen) = said.last_seen_ms
  ORDER BY s.node_id
  FOR NO KEY UPDATE OF s
), closed AS (
  UPDATE node_sessions s SET gateway_id = NULL, disconnected_at = compute_now()
  FROM locked WHERE s.node_id = locked.node_id
), nodes_locked AS MATERIALIZED (
  SELECT n.node_id, locked.reason FROM nodes n JOIN locked ON locked.node_id = n.node_id
  ORDER BY n.node_id
  FOR NO KEY UPDATE OF n
), disconnected AS (
  UPDATE nodes n SET state = 'disconnected', state_reason = nodes_locked.reason, state_changed_at = compute_now()
  FROM nodes_locked WHERE n.node_id = nodes_locked.node_id
), told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT outbox_id, :event_type, node_id, outbox_payload::jsonb FROM locked ORDER BY outbox_id
)
SELECT node_id FROM locked;

-- name: liveness.mark_unreachable
-- other: nobody holds these nodes; the epoch that was read keeps a node that has said Hello meanwhile out of it
WITH said AS MATERIALIZED (
  SELECT u.* FROM unnest(:node_ids::text[], :session_epochs::bigint[], :reasons::text[], :outbox_ids::text[],
    :outbox_payloads::text[]) AS u (node_id, session_epoch, reason, outbox_id, outbox_payload)
), locked AS MATERIALIZED (
  SELECT said.* FROM node_sessions s JOIN said ON said.node_id = s.node_id
  WHERE s.gateway_id IS NULL AND s.session_epoch = said.session_epoch
  ORDER BY s.node_id
  FOR NO KEY UPDATE OF s
), nodes_locked AS MATERIALIZED (
  SELECT n.node_id, locked.reason, locked.outbox_id, locked.outbox_payload
  FROM nodes n JOIN locked ON locked.node_id = n.node_id
  WHERE n.state = 'disconnected'
  ORDER BY n.node_id
  FOR NO KEY UPDATE OF n
), marked AS (
  UPDATE nodes n SET state = 'unreachable', state_reason = nodes_locked.reason, state_changed_at = compute_now()
  FROM nodes_locked WHERE n.node_id = nodes_locked.node_id
), told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT outbox_id, :event_type, node_id, outbox_payload::jsonb FROM nodes_locked ORDER BY outbox_id
)
SELECT node_id FROM nodes_locked;
