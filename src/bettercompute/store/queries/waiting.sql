-- Why a command waits, and its end by an administrator's word.

-- name: waiting.facts
-- other: read; what dispatch asks of one command, at one moment
SELECT c.id AS command_id, c.kind, c.lane::int AS lane, c.state::int AS state, c.signature IS NOT NULL AS signed, c.held_back,
  c.busy_count, c.cancel_requested_at IS NOT NULL AS cancel_requested, to_ms(c.not_before) AS not_before_ms,
  to_ms(c.asked_not_before) AS asked_not_before_ms, to_ms(c.not_after) AS not_after_ms, to_ms(compute_now()) AS now_ms, c.node_id,
  coalesce(n.state, 'forgotten') AS node_state, coalesce(n.state_reason, '') AS node_state_reason, n.quarantine_reason,
  n.revoked_by, CASE WHEN n.locked_until IS NULL OR n.locked_until > compute_now() THEN n.locked_by END AS locked_by,
  to_ms(n.locked_until) - to_ms(compute_now()) AS locked_left_ms,
  s.gateway_id, coalesce(l.retired_at IS NULL AND l.expires_at > compute_now(), false) AS gateway_live,
  coalesce(l.draining OR l.drain_requested_at IS NOT NULL, false) AS gateway_draining,
  coalesce(s.upgrade_only, false) AS upgrade_only, coalesce(s.signed_only, false) AS signed_only,
  coalesce(s.capabilities, '{}') AS capabilities, p.allowed_kinds,
  ARRAY (
    SELECT ROW (h.id, h.kind, h.state::int) FROM commands h
    WHERE h.node_id = c.node_id AND h.state IN (2, 3, 4) AND h.lane = c.lane AND NOT h.held_back AND h.id <> c.id
    ORDER BY h.seq LIMIT :holders_max) AS holders,
  -- What was abandoned may run on the node of this session until its own time is over.
  ARRAY (
    SELECT ROW (h.id, h.kind, h.state::int) FROM commands h
    WHERE h.node_id = c.node_id AND h.reason = 'abandoned' AND h.state = 6 AND h.lane = c.lane
      AND h.session_id = s.session_id AND h.session_epoch = s.session_epoch
      AND h.finished_at + ms(h.timeout_ms) > compute_now()
    ORDER BY h.seq LIMIT :holders_max) AS abandoned,
  -- What waits for its own time is not in the way.
  (SELECT count(*) FROM (
     (SELECT FROM commands b
       WHERE b.node_id = c.node_id AND b.lane = c.lane AND b.state = 1 AND b.not_before IS NULL AND b.seq < c.seq
       LIMIT :ahead_max)
     UNION ALL
     (SELECT FROM commands b
       WHERE b.node_id = c.node_id AND b.lane = c.lane AND b.state = 1 AND b.not_before <= compute_now()
         AND b.not_before > '-infinity' AND b.seq < c.seq
       LIMIT :ahead_max)) before) AS ahead,
  (SELECT a.batch_id FROM approval_batches a WHERE a.batch_id = c.batch_id AND a.state = 'waiting') AS approval_batch_id,
  (SELECT a.asked_by FROM approval_batches a
    WHERE a.batch_id = c.batch_id AND a.state = 'approved' AND a.stepwise AND c.not_before = c.not_after) AS led_by
FROM commands c
LEFT JOIN nodes n ON n.node_id = c.node_id
LEFT JOIN node_sessions s ON s.node_id = c.node_id
LEFT JOIN node_certs p ON p.serial = s.cert_serial
LEFT JOIN leases l ON l.name = s.gateway_id
WHERE c.id = :command_id;

-- name: waiting.abandon
-- other: an administrator's word ends what is in flight, whatever the node does with it
WITH locked AS (
  SELECT id FROM commands WHERE id = :command_id AND state IN (2, 3, 4) ORDER BY id FOR NO KEY UPDATE),
abandoned AS (
  UPDATE commands c
  SET state = 6, reason = :reason, message = :message, finished_at = compute_now(), held_back = false
  FROM locked WHERE c.id = locked.id
  RETURNING c.id, c.node_id, c.kind, c.state, c.reason, c.batch_id),
told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT :outbox_id, :event_type, node_id,
    jsonb_build_object('commandId', id, 'kind', kind, 'state', state, 'reason', reason, 'batchId', batch_id)
  FROM abandoned)
SELECT id, node_id FROM abandoned;
