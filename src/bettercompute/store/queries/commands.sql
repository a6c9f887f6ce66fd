-- Commands as people and the API see them. What gateways do with them is in delivery.sql.

-- name: commands.draw_seqs
-- other: the place in the order is part of the signed body, so it is drawn before the row exists
SELECT nextval('commands_seq') AS seq FROM generate_series(1, :count::integer);

-- name: commands.insert
-- other: enqueued by an operator or a controller; nodes that have gone meanwhile are left out
INSERT INTO commands (id, node_id, kind, lane, seq, batch_id, body, signature, signed_under, batch_approval,
                      batch_proof, payload, created_by, not_before, asked_not_before, not_after, timeout_ms,
                      attestation)
SELECT v.id, v.node_id, v.kind, v.lane, v.seq, v.batch_id, v.body, v.signature, v.signed_under, v.batch_approval,
       v.batch_proof, v.payload::jsonb, v.created_by, at_ms(v.not_before_ms),
       at_ms(v.asked_not_before_ms), at_ms(v.not_after_ms), v.timeout_ms, v.attestation
  FROM unnest(:ids::text[], :node_ids::text[], :kinds::text[], :lanes::smallint[], :seqs::bigint[], :batch_ids::text[],
              :bodies::bytea[], :signatures::bytea[], :signed_unders::text[], :batch_approvals::bytea[],
              :batch_proofs::bytea[], :payloads::text[], :created_bys::text[], :not_befores_ms::bigint[],
              :asked_not_befores_ms::bigint[], :not_afters_ms::bigint[], :timeouts_ms::bigint[], :attestations::text[])
       AS v (id, node_id, kind, lane, seq, batch_id, body, signature, signed_under, batch_approval, batch_proof, payload,
             created_by, not_before_ms, asked_not_before_ms, not_after_ms, timeout_ms, attestation)
  JOIN nodes n ON n.node_id = v.node_id
 ORDER BY v.id
RETURNING id, node_id;

-- name: commands.get
-- other: read
SELECT id AS command_id, node_id, kind, lane, seq, batch_id, payload::text AS payload, state,
       to_ms(created_at) AS created_at_ms, created_by, to_ms(not_before) AS not_before_ms,
       to_ms(asked_not_before) AS asked_not_before_ms, to_ms(not_after) AS not_after_ms, timeout_ms, session_epoch, session_id, attempt, busy_count, sent_boot_id,
       to_ms(cancel_requested_at) AS cancel_requested_at_ms, cancel_requested_by, cancel_reason,
       to_ms(dispatched_at) AS dispatched_at_ms, to_ms(acked_at) AS acked_at_ms, to_ms(running_at) AS running_at_ms,
       to_ms(started_at) AS started_at_ms, to_ms(finished_at) AS finished_at_ms, progress, reason, message, result,
       unauthenticated, attestation, attestation_reason,
       state IN (2, 3, 4) AND not_after < compute_now() AS overdue
  FROM commands WHERE id = ANY (:command_ids::text[])
 ORDER BY id;

-- name: commands.list
-- other: read, newest first
SELECT id AS command_id, node_id, kind, lane, seq, batch_id, payload::text AS payload, state,
       to_ms(created_at) AS created_at_ms, created_by, to_ms(not_before) AS not_before_ms,
       to_ms(asked_not_before) AS asked_not_before_ms, to_ms(not_after) AS not_after_ms, timeout_ms, session_epoch, session_id, attempt, busy_count, sent_boot_id,
       to_ms(cancel_requested_at) AS cancel_requested_at_ms, cancel_requested_by, cancel_reason,
       to_ms(dispatched_at) AS dispatched_at_ms, to_ms(acked_at) AS acked_at_ms, to_ms(running_at) AS running_at_ms,
       to_ms(started_at) AS started_at_ms, to_ms(finished_at) AS finished_at_ms, progress, reason, message, result,
       unauthenticated, attestation, attestation_reason,
       state IN (2, 3, 4) AND not_after < compute_now() AS overdue
  FROM commands
 WHERE id < :before
   AND (:kind::text IS NULL OR kind = :kind)
   AND (:states::smallint[] IS NULL OR state = ANY (:states))
 ORDER BY id DESC
 LIMIT :page_size;

-- name: commands.list_of_nodes
-- other: read, newest first: the newest of each node, and of those the newest
SELECT id AS command_id, node_id, kind, lane, seq, batch_id, payload::text AS payload, state,
       to_ms(created_at) AS created_at_ms, created_by, to_ms(not_before) AS not_before_ms,
       to_ms(asked_not_before) AS asked_not_before_ms, to_ms(not_after) AS not_after_ms, timeout_ms, session_epoch, session_id, attempt, busy_count, sent_boot_id,
       to_ms(cancel_requested_at) AS cancel_requested_at_ms, cancel_requested_by, cancel_reason,
       to_ms(dispatched_at) AS dispatched_at_ms, to_ms(acked_at) AS acked_at_ms, to_ms(running_at) AS running_at_ms,
       to_ms(started_at) AS started_at_ms, to_ms(finished_at) AS finished_at_ms, progress, reason, message, result,
       unauthenticated, attestation, attestation_reason,
       state IN (2, 3, 4) AND not_after < compute_now() AS overdue
  FROM unnest(:node_ids::text[]) AS wanted (of_node)
 CROSS JOIN LATERAL (
   SELECT * FROM commands
    WHERE node_id = of_node AND id < :before
      AND (:kind::text IS NULL OR kind = :kind)
      AND (:states::smallint[] IS NULL OR state = ANY (:states))
    ORDER BY id DESC LIMIT :page_size) c
 ORDER BY id DESC
 LIMIT :page_size;

-- name: commands.list_of_batch
-- other: read, in the order of ids
SELECT id AS command_id, node_id, kind, lane, seq, batch_id, payload::text AS payload, state,
       to_ms(created_at) AS created_at_ms, created_by, to_ms(not_before) AS not_before_ms,
       to_ms(asked_not_before) AS asked_not_before_ms, to_ms(not_after) AS not_after_ms, timeout_ms, session_epoch, session_id, attempt, busy_count, sent_boot_id,
       to_ms(cancel_requested_at) AS cancel_requested_at_ms, cancel_requested_by, cancel_reason,
       to_ms(dispatched_at) AS dispatched_at_ms, to_ms(acked_at) AS acked_at_ms, to_ms(running_at) AS running_at_ms,
       to_ms(started_at) AS started_at_ms, to_ms(finished_at) AS finished_at_ms, progress, reason, message, result,
       unauthenticated, attestation, attestation_reason,
       state IN (2, 3, 4) AND not_after < compute_now() AS overdue
  FROM commands
 WHERE batch_id = :batch_id AND id > :after
   AND (:node_id::text IS NULL OR node_id = :node_id)
   AND (:kind::text IS NULL OR kind = :kind)
   AND (:states::smallint[] IS NULL OR state = ANY (:states))
 ORDER BY id
 LIMIT :page_size;

-- name: commands.states
-- other: read by whoever waits for commands to end: the small columns only
SELECT id AS command_id, node_id, state, reason, message FROM commands
 WHERE id = ANY (:command_ids::text[]) ORDER BY id;

-- name: commands.signed_body
-- other: read
SELECT node_id, body, signature, result, update_signature FROM commands WHERE id = :command_id;

-- name: commands.output
-- other: read
SELECT output_offset, data, dropped_bytes FROM command_output
 WHERE command_id = :command_id AND output_offset >= :from_offset
 ORDER BY output_offset
 LIMIT :page_size;

-- name: commands.output_of_batch
-- other: read by whoever follows a run
SELECT c.id AS command_id, c.progress, o.output_offset, o.data, o.dropped_bytes
  FROM unnest(:command_ids::text[], :from_offsets::bigint[]) AS wanted (command_id, from_offset)
  JOIN commands c ON c.id = wanted.command_id AND c.batch_id = :batch_id
  LEFT JOIN LATERAL (
    SELECT output_offset, data, dropped_bytes FROM command_output
     WHERE command_id = wanted.command_id AND output_offset >= wanted.from_offset
     ORDER BY output_offset LIMIT :page_size) o ON true
 WHERE o.output_offset IS NOT NULL OR c.progress IS NOT NULL
 ORDER BY c.id, o.output_offset;

-- name: commands.lock
-- other: the rows that request_cancel is about to change, in the order of ids
SELECT id AS command_id, node_id, state, cancel_requested_at IS NOT NULL AS cancel_requested
  FROM commands WHERE id = ANY (:command_ids::text[])
 ORDER BY id FOR NO KEY UPDATE;

-- name: commands.cancel_pending
-- other: nothing was sent yet, so the cancel is the end; the rows are locked by commands.lock
WITH locked AS (
  SELECT c.id, said.outbox_id
    FROM commands c JOIN unnest(:command_ids::text[], :outbox_ids::text[]) AS said (id, outbox_id) ON said.id = c.id
   WHERE c.state = 1 ORDER BY c.id FOR NO KEY UPDATE OF c),
cancelled AS (
  UPDATE commands c
     SET state = 7, finished_at = compute_now(), reason = :end_reason, message = :message,
         cancel_requested_at = compute_now(), cancel_requested_by = :requested_by, cancel_reason = :cancel_reason
    FROM locked WHERE c.id = locked.id
  RETURNING c.id, c.node_id, c.kind, c.state, c.reason, c.batch_id, locked.outbox_id),
told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT outbox_id, :event_type, node_id,
         jsonb_build_object('commandId', id, 'kind', kind, 'state', state, 'reason', reason, 'batchId', batch_id)
    FROM cancelled ORDER BY outbox_id)
SELECT id AS command_id FROM cancelled;

-- name: commands.request_cancel
-- other: durable, so that any later session of the node hears of it; the rows are locked by commands.lock
WITH locked AS (
  SELECT id FROM commands
   WHERE id = ANY (:command_ids::text[]) AND state IN (2, 3, 4) AND cancel_requested_at IS NULL
   ORDER BY id FOR NO KEY UPDATE)
UPDATE commands c
   SET cancel_requested_at = compute_now(), cancel_requested_by = :requested_by, cancel_reason = :cancel_reason
  FROM locked WHERE c.id = locked.id
RETURNING c.id AS command_id;

-- name: commands.notify
-- other: a hint for gateways and for those who wait
SELECT pg_notify(:channel, payload) FROM unnest(:payloads::text[]) AS payload;

-- name: commands.nodes_of_batch
-- other: read; the nodes that a batch asked
SELECT DISTINCT node_id FROM commands WHERE batch_id = :batch_id;

-- name: commands.states_of_batch
-- other: read by whoever waits for a run to end: the small columns only
SELECT id AS command_id, node_id, state, reason, message FROM commands WHERE batch_id = :batch_id AND id > :after
 ORDER BY id;
