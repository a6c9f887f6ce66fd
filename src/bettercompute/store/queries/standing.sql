-- What operators have said of a node: locked, revoked, forgotten. All of it under the lock of nodes.lock_session.

-- name: standing.lock
-- other: an operator's word; a second lock replaces the first
UPDATE nodes
   SET locked_at = compute_now(), locked_until = compute_now() + ms(:ttl_ms::bigint), locked_by = :locked_by,
       lock_reason = :reason, standing_changed_at = compute_now()
 WHERE node_id = :node_id
RETURNING node_id;

-- name: standing.unlock
-- other: an operator's word; a lock that has ended by itself leaves nothing to undo
WITH held AS (
  SELECT node_id, locked_until IS NULL OR locked_until > compute_now() AS holds
    FROM nodes WHERE node_id = :node_id AND locked_at IS NOT NULL ORDER BY node_id FOR NO KEY UPDATE)
UPDATE nodes n
   SET locked_at = NULL, locked_until = NULL, locked_by = NULL, lock_reason = NULL, standing_changed_at = compute_now()
  FROM held WHERE n.node_id = held.node_id
RETURNING held.holds;

-- name: standing.revoke
-- other: an operator's word; its certificates are revoked by a statement of their own
UPDATE nodes
   SET revoked_at = compute_now(), revoked_by = :revoked_by, revoked_reason = :reason, standing_changed_at = compute_now()
 WHERE node_id = :node_id
RETURNING identity_generation;

-- name: standing.changed_since
-- other: read by every gateway; what was said and what was taken back
SELECT node_id, locked_by, lock_reason, to_ms(locked_until) AS locked_until_ms, revoked_by, revoked_reason,
       to_ms(standing_changed_at) AS changed_at_ms,
       locked_at IS NOT NULL AND (locked_until IS NULL OR locked_until > compute_now()) AS locked
  FROM nodes WHERE standing_changed_at >= at_ms(:since_ms)
 ORDER BY standing_changed_at;

-- name: standing.barred
-- other: read whole by every gateway once a minute
SELECT node_id, locked_by, lock_reason, to_ms(locked_until) AS locked_until_ms, revoked_by, revoked_reason,
       to_ms(standing_changed_at) AS changed_at_ms,
       locked_at IS NOT NULL AND (locked_until IS NULL OR locked_until > compute_now()) AS locked
  FROM nodes WHERE locked_at IS NOT NULL OR revoked_at IS NOT NULL
 ORDER BY node_id;

-- name: standing.lock_node
-- other: the node that is about to be forgotten, before its commands: locks have one order
SELECT n.node_id, n.identity_generation, s.gateway_id
  FROM nodes n JOIN node_sessions s ON s.node_id = n.node_id
 WHERE n.node_id = :node_id FOR UPDATE OF n;

-- name: standing.end_commands
-- other: an operator's word on the node ends what waits for it; a batch at a time
WITH waiting AS MATERIALIZED (
  SELECT c.id FROM commands c
   WHERE c.node_id = :node_id AND c.state = ANY (:states::smallint[])
   ORDER BY c.id LIMIT :batch
   FOR NO KEY UPDATE OF c
), ended AS (
  UPDATE commands c
     SET state = CASE WHEN c.state = 1 THEN 7 ELSE 6 END, finished_at = compute_now(), reason = :reason,
         message = CASE WHEN c.state = 1 THEN :pending_message ELSE :in_flight_message END, held_back = false
    FROM waiting WHERE c.id = waiting.id
  RETURNING c.id, c.node_id, c.kind, c.state, c.reason, c.batch_id
), told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT numbered.outbox_id, :event_type, e.node_id,
    jsonb_build_object('commandId', e.id, 'kind', e.kind, 'state', e.state, 'reason', e.reason, 'batchId', e.batch_id)
  FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM ended) e
  JOIN unnest(:outbox_ids::text[]) WITH ORDINALITY AS numbered (outbox_id, n) ON numbered.n = e.n
  ORDER BY numbered.outbox_id
)
SELECT id AS command_id, state FROM ended;

-- name: standing.forget
-- other: the row and all that goes with it; locked by standing.lock_node
DELETE FROM nodes WHERE node_id = :node_id;

-- name: standing.notify
-- other: a hint for the gateways
SELECT pg_notify(:channel, payload) FROM unnest(:payloads::text[]) AS payload;
