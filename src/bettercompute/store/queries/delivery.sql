-- Delivery: facts of all sessions in batches, dispatch, put-back. Lock order: node_sessions, nodes, commands, inserts.

-- name: delivery.store_command_facts
-- fact
WITH said AS MATERIALIZED (
  SELECT u.*
  FROM unnest(:command_ids::text[], :node_ids::text[], :states::smallint[], :saw_acked::boolean[],
    :saw_running::boolean[], :reasons::text[], :messages::text[], :results::bytea[], :signatures::bytea[],
    :unauthenticated::boolean[], :progresses::bytea[], :started_at_ms::bigint[], :outbox_ids::text[])
    AS u (id, node_id, state, saw_acked, saw_running, reason, message, result, signature, unauthenticated, progress,
      started_at_ms, outbox_id)
), held AS MATERIALIZED (
  SELECT c.id, c.node_id, c.state FROM commands c JOIN said ON said.id = c.id
  WHERE c.node_id = said.node_id
  ORDER BY c.id
  FOR NO KEY UPDATE OF c
), moved AS (
  -- A higher state is news, a lower one is old, and a terminal one is final (delivery.commands.FACT_MERGE).
  UPDATE commands c
  SET state = said.state,
    acked_at = CASE WHEN said.saw_acked OR said.saw_running THEN coalesce(c.acked_at, compute_now()) ELSE c.acked_at END,
    running_at = CASE WHEN said.saw_running THEN coalesce(c.running_at, compute_now()) ELSE c.running_at END,
    finished_at = CASE WHEN said.state >= 5 THEN compute_now() END,
    reason = said.reason, message = said.message, result = said.result, update_signature = said.signature,
    unauthenticated = said.unauthenticated, progress = coalesce(said.progress, c.progress),
    started_at = coalesce(at_ms(said.started_at_ms), c.started_at), held_back = false
  FROM held, said
  WHERE c.id = held.id AND said.id = held.id AND said.node_id = c.node_id AND held.state < 5
    AND (said.state > held.state OR (said.state = held.state AND said.progress IS NOT NULL))
  RETURNING c.id, c.node_id, c.kind, c.state, c.reason, c.batch_id, said.outbox_id
), told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT outbox_id, :event_type, node_id,
    jsonb_build_object('commandId', id, 'kind', kind, 'state', state, 'reason', reason, 'batchId', batch_id)
  FROM moved WHERE state >= 5 ORDER BY outbox_id
)
SELECT (SELECT count(*) FROM moved) AS moved,
  (SELECT count(*) FROM said JOIN held USING (id, node_id) WHERE held.state < 5 AND said.state < held.state)
    AS backwards,
  (SELECT count(*) FROM said LEFT JOIN held USING (id, node_id)
   WHERE said.state >= 5 AND (held.state IS NULL OR held.state >= 5))
    AS late;

-- name: delivery.store_events
-- fact
WITH batches AS MATERIALIZED (
  SELECT u.* FROM unnest(:node_ids::text[], :journal_ids::text[], :first_seqs::bigint[], :last_seqs::bigint[])
    WITH ORDINALITY AS u (node_id, journal_id, first_seq, last_seq, number)
), locked AS MATERIALIZED (
  SELECT s.node_id, s.journal_id, s.acked_event_seq FROM node_sessions s
  WHERE s.node_id IN (SELECT node_id FROM batches)
  ORDER BY s.node_id
  FOR NO KEY UPDATE OF s
), stored AS (
  INSERT INTO node_events (node_id, journal_id, seq, event_id, type, occurred_at, recovered, payload)
  -- Columns come as text, separated by chr(31); the column of a single event without a payload is the empty text.
  SELECT b.node_id, b.journal_id, u.seq, u.event_id, u.type, at_ms(u.occurred_at_ms), u.recovered,
    convert_to(coalesce(u.payload, ''), 'UTF8')
  FROM unnest(string_to_array(:batch_numbers::text, chr(31))::int[], string_to_array(:seqs::text, chr(31))::bigint[],
    string_to_array(:event_ids::text, chr(31)), string_to_array(:types::text, chr(31)),
    string_to_array(:occurred_at_ms::text, chr(31))::bigint[], string_to_array(:recovered::text, chr(31))::boolean[],
    string_to_array(:payloads::text, chr(31)))
    AS u (batch_number, seq, event_id, type, occurred_at_ms, recovered, payload)
  JOIN batches b ON b.number = u.batch_number
  JOIN locked ON locked.node_id = b.node_id
  -- Nothing past a gap: what is missing before it comes with the next Hello, and would be stored after it.
  WHERE locked.journal_id IS DISTINCT FROM b.journal_id
    OR (b.first_seq <= locked.acked_event_seq + 1 AND u.seq <= b.last_seq)
  ORDER BY b.node_id, b.journal_id, u.seq
  ON CONFLICT DO NOTHING
  RETURNING node_id
), raised AS (
  -- Only for the journal that the row names, and never past a gap.
  UPDATE node_sessions s SET acked_event_seq = b.last_seq
  FROM locked, batches b
  WHERE s.node_id = locked.node_id AND b.node_id = locked.node_id AND b.journal_id = locked.journal_id
    AND b.first_seq <= locked.acked_event_seq + 1 AND b.last_seq > locked.acked_event_seq
  RETURNING s.node_id
)
SELECT b.node_id, b.journal_id,
  (CASE WHEN locked.journal_id IS DISTINCT FROM b.journal_id THEN NULL
        WHEN b.first_seq <= locked.acked_event_seq + 1 THEN greatest(b.last_seq, locked.acked_event_seq)
        ELSE locked.acked_event_seq END)::bigint AS acked_event_seq,
  (SELECT count(*) FROM stored) AS stored, (SELECT count(*) FROM raised) AS raised
FROM batches b LEFT JOIN locked ON locked.node_id = b.node_id;

-- name: delivery.store_statuses
-- fact
WITH said AS MATERIALIZED (
  SELECT u.*
  FROM unnest(:node_ids::text[], :observed::bigint[], :applied::bigint[], :reports::bytea[], :trust_versions::bigint[],
    :approver_epochs::bigint[], :approver_sha256s::bytea[])
    AS u (node_id, observed, applied, report, trust_version, approver_epoch, approver_sha256)
), sessions_locked AS MATERIALIZED (
  SELECT s.node_id FROM node_sessions s
  WHERE s.node_id IN (SELECT node_id FROM said WHERE trust_version > 0)
  ORDER BY s.node_id
  FOR NO KEY UPDATE OF s
), trusted AS (
  -- A report only ever raises it, and an older report never pairs an old approver set with a newer version.
  UPDATE node_sessions s
  SET trust_version = said.trust_version, approver_set_epoch = said.approver_epoch,
    approver_set_sha256 = said.approver_sha256
  FROM sessions_locked, said
  WHERE s.node_id = sessions_locked.node_id AND said.node_id = s.node_id AND said.trust_version >= s.trust_version
), nodes_locked AS MATERIALIZED (
  SELECT n.node_id FROM nodes n
  WHERE n.node_id IN (SELECT node_id FROM said) AND (SELECT count(*) FROM sessions_locked) >= 0
  ORDER BY n.node_id
  FOR NO KEY UPDATE OF n
), raised AS (
  UPDATE nodes n
  SET observed_generation = greatest(n.observed_generation, said.observed, said.applied),
    applied_generation = greatest(n.applied_generation, said.applied)
  FROM nodes_locked, said
  WHERE n.node_id = nodes_locked.node_id AND said.node_id = n.node_id
    AND (said.observed > n.observed_generation OR said.applied > n.applied_generation)
), kept AS (
  INSERT INTO node_status (node_id, report)
  SELECT nodes_locked.node_id, said.report FROM nodes_locked JOIN said USING (node_id)
  WHERE said.report IS NOT NULL ORDER BY node_id
  ON CONFLICT (node_id) DO UPDATE SET report = excluded.report, received_at = compute_now()
), gone AS (
  DELETE FROM node_conditions d
  WHERE d.source = 'daemon'
    AND d.node_id IN (SELECT node_id FROM nodes_locked JOIN said USING (node_id) WHERE said.report IS NOT NULL)
    AND NOT EXISTS (
      SELECT FROM unnest(:condition_node_ids::text[], :condition_types::text[]) AS u (node_id, type)
      WHERE u.node_id = d.node_id AND u.type = d.type)
), conditions AS (
  INSERT INTO node_conditions AS d (node_id, type, source, status, reason, message, changed_at)
  SELECT nodes_locked.node_id, u.type, 'daemon', u.status, u.reason, u.message, compute_now()
  FROM unnest(:condition_node_ids::text[], :condition_types::text[], :condition_statuses::text[],
    :condition_reasons::text[], :condition_messages::text[]) AS u (node_id, type, status, reason, message)
  JOIN nodes_locked ON nodes_locked.node_id = u.node_id
  ORDER BY u.node_id, u.type
  ON CONFLICT (node_id, type) DO UPDATE
  SET status = excluded.status, reason = excluded.reason, message = excluded.message, updated_at = compute_now(),
    changed_at = CASE WHEN d.status = excluded.status THEN d.changed_at ELSE compute_now() END
  WHERE d.source = 'daemon'
)
SELECT count(*) AS nodes FROM nodes_locked;

-- name: delivery.store_output
-- fact
INSERT INTO command_output (command_id, output_offset, node_id, data, dropped_bytes)
SELECT u.command_id, u.output_offset, u.node_id, u.data, u.dropped_bytes
FROM unnest(:command_ids::text[], :node_ids::text[], :offsets::bigint[], :pieces::bytea[], :dropped::bigint[])
  AS u (command_id, node_id, output_offset, data, dropped_bytes)
JOIN commands c ON c.id = u.command_id AND c.node_id = u.node_id
ORDER BY u.command_id, u.output_offset
ON CONFLICT DO NOTHING;

-- name: delivery.drop_output
-- fact
WITH locked AS MATERIALIZED (
  SELECT o.command_id, o.output_offset
  FROM unnest(:command_ids::text[], :node_ids::text[]) AS u (command_id, node_id)
  JOIN commands c ON c.id = u.command_id AND c.node_id = u.node_id
  JOIN command_output o ON o.command_id = c.id
  ORDER BY o.command_id, o.output_offset
  FOR UPDATE OF o
)
DELETE FROM command_output o USING locked
WHERE o.command_id = locked.command_id AND o.output_offset = locked.output_offset;

-- name: delivery.trim_output
-- fact
WITH sized AS MATERIALIZED (
  -- By what is there and not by offsets, which are the daemon's word: a piece at each of them would be kept. Nor may
  -- pieces of nothing be without number: each of them is read again with the next one.
  SELECT o.command_id, o.output_offset,
    sum(greatest(octet_length(o.data), :piece_bytes_min::int))
      OVER (PARTITION BY o.command_id ORDER BY o.output_offset DESC ROWS UNBOUNDED PRECEDING)
      - greatest(octet_length(o.data), :piece_bytes_min::int) AS bytes_after
  FROM command_output o WHERE o.command_id = ANY (:command_ids::text[])
), locked AS MATERIALIZED (
  SELECT o.command_id, o.output_offset
  FROM command_output o JOIN sized ON sized.command_id = o.command_id AND sized.output_offset = o.output_offset
  WHERE sized.bytes_after >= :kept_bytes
  ORDER BY o.command_id, o.output_offset
  FOR UPDATE OF o
)
DELETE FROM command_output o USING locked
WHERE o.command_id = locked.command_id AND o.output_offset = locked.output_offset;

-- name: delivery.dispatch
-- fenced
WITH asked AS MATERIALIZED (
  SELECT u.*
  FROM unnest(:node_ids::text[], :session_ids::text[], :session_epochs::bigint[], :lanes::smallint[],
    :pending_limits::int[], :kinds::text[], :signed_only::boolean[])
    AS u (node_id, session_id, session_epoch, lane, pending_limit, kinds, signed_only)
), routed AS MATERIALIZED (
  -- Shared, so that a Hello that takes the node over waits for these marks, or these wait and find a newer epoch.
  SELECT s.node_id, s.session_id, s.session_epoch, s.boot_id FROM node_sessions s
  WHERE (s.node_id, s.session_id, s.session_epoch) IN (SELECT node_id, session_id, session_epoch FROM asked)
    AND s.gateway_id = :gateway_id AND (SELECT holds_lease(:gateway_id, :lease_token))
  ORDER BY s.node_id
  FOR SHARE OF s
), chosen AS MATERIALIZED (
  SELECT pending.id, routed.*
  FROM routed JOIN asked ON asked.node_id = routed.node_id
  CROSS JOIN LATERAL (
    SELECT may_go.id FROM (
      (SELECT c.id, c.seq FROM commands c
       WHERE c.node_id = routed.node_id AND c.lane = asked.lane AND c.state = 1 AND c.not_before IS NULL
         AND c.cancel_requested_at IS NULL AND c.not_after > compute_now()
         AND (asked.kinds IS NULL OR c.kind = ANY (string_to_array(asked.kinds, ',')))
         AND (NOT asked.signed_only OR c.signature IS NOT NULL)
       ORDER BY c.seq
       LIMIT asked.pending_limit)
      UNION ALL
      -- Those whose time has come take their place by seq; the bound that excludes nothing names the index.
      (SELECT c.id, c.seq FROM commands c
       WHERE c.node_id = routed.node_id AND c.lane = asked.lane AND c.state = 1
         AND c.not_before <= compute_now() AND c.not_before > '-infinity'
         AND c.cancel_requested_at IS NULL AND c.not_after > compute_now()
         AND (asked.kinds IS NULL OR c.kind = ANY (string_to_array(asked.kinds, ',')))
         AND (NOT asked.signed_only OR c.signature IS NOT NULL)
       ORDER BY c.seq
       LIMIT asked.pending_limit)) may_go
    ORDER BY may_go.seq
    LIMIT asked.pending_limit) pending
  UNION ALL
  SELECT held.id, routed.* FROM routed JOIN unnest(:held_node_ids::text[], :held_ids::text[]) AS held (node_id, id)
    ON held.node_id = routed.node_id
), locked AS MATERIALIZED (
  -- Judged below, by what was locked. A condition on the state would be estimated by statistics, which may be of a
  -- moment when nothing was pending; then one row is expected, and thousands are joined in loops over whole tables.
  SELECT c.id, c.state, c.cancel_requested_at, chosen.session_id, chosen.session_epoch, chosen.boot_id,
    (c.session_id, c.session_epoch) = (chosen.session_id, chosen.session_epoch) AS in_session
  FROM commands c JOIN chosen ON chosen.id = c.id AND chosen.node_id = c.node_id
  ORDER BY c.id
  FOR NO KEY UPDATE OF c
)
UPDATE commands c
SET state = greatest(c.state, 2), session_id = locked.session_id, session_epoch = locked.session_epoch,
  attempt = c.attempt + 1, sent_boot_id = locked.boot_id, dispatched_at = compute_now(), held_back = false
FROM locked
WHERE c.id = locked.id AND locked.cancel_requested_at IS NULL
  AND (locked.state = 1 OR (locked.state IN (2, 3, 4) AND locked.in_session))
RETURNING c.id, c.node_id, c.session_id, c.kind, c.lane, c.seq, c.attempt, c.state, c.body, c.signature,
  c.batch_approval, c.batch_proof;

-- name: delivery.marked
-- other: read; what is marked for these sessions and not acked, after a dispatch whose outcome was not heard
SELECT c.node_id, c.id, c.kind, c.lane::int AS lane, c.seq, c.signature IS NOT NULL AS signed
FROM unnest(:node_ids::text[], :session_ids::text[], :session_epochs::bigint[]) AS u (node_id, session_id, session_epoch)
JOIN commands c ON c.node_id = u.node_id AND c.session_id = u.session_id AND c.session_epoch = u.session_epoch
WHERE c.state = 2
ORDER BY c.node_id, c.seq;

-- name: delivery.put_back
-- fenced
WITH said AS MATERIALIZED (
  SELECT u.*
  FROM unnest(:command_ids::text[], :node_ids::text[], :session_ids::text[], :session_epochs::bigint[], :attempts::int[],
    :back_offs_ms::bigint[], :outbox_ids::text[])
    AS u (id, node_id, session_id, session_epoch, attempt, back_off_ms, outbox_id)
), routed AS MATERIALIZED (
  SELECT s.node_id FROM node_sessions s
  WHERE (s.node_id, s.session_id, s.session_epoch) IN (SELECT node_id, session_id, session_epoch FROM said)
    AND s.gateway_id = :gateway_id AND (SELECT holds_lease(:gateway_id, :lease_token))
  ORDER BY s.node_id
  FOR SHARE OF s
), locked AS MATERIALIZED (
  SELECT c.id, c.state, said.back_off_ms, said.outbox_id
  FROM commands c JOIN said ON said.id = c.id JOIN routed ON routed.node_id = said.node_id
  WHERE c.node_id = said.node_id AND c.state IN (2, 3, 4) AND c.session_id = said.session_id
    AND c.session_epoch = said.session_epoch AND c.attempt = said.attempt
  ORDER BY c.id
  FOR NO KEY UPDATE OF c
), back AS (
  UPDATE commands c
  -- What the node has once accepted stays in flight: its session holds it back and sends it again, with what was seen.
  SET state = CASE WHEN c.cancel_requested_at IS NOT NULL THEN 7 WHEN locked.state = 2 THEN 1 ELSE locked.state END,
    session_id = CASE WHEN locked.state = 2 THEN NULL ELSE c.session_id END,
    session_epoch = CASE WHEN locked.state = 2 THEN NULL ELSE c.session_epoch END,
    busy_count = c.busy_count + 1, held_back = c.cancel_requested_at IS NULL AND locked.state > 2,
    -- Never sooner than was asked for, whatever the database's clock did meanwhile.
    not_before = CASE WHEN locked.state = 2 THEN greatest(compute_now() + ms(locked.back_off_ms), c.asked_not_before)
                      ELSE c.not_before END,
    reason = CASE WHEN c.cancel_requested_at IS NULL THEN c.reason ELSE 'cancelled' END,
    message = CASE WHEN c.cancel_requested_at IS NULL THEN c.message
                   WHEN locked.state = 2 THEN 'cancelled before the node accepted it'
                   ELSE 'cancelled while the node was too busy to take it up again' END,
    finished_at = CASE WHEN c.cancel_requested_at IS NULL THEN NULL ELSE compute_now() END
  FROM locked
  WHERE c.id = locked.id
  RETURNING c.id, c.node_id, c.kind, c.lane, c.seq, c.signature IS NOT NULL AS signed, c.state, c.reason, c.batch_id,
    locked.outbox_id
), told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT outbox_id, :event_type, node_id,
    jsonb_build_object('commandId', id, 'kind', kind, 'state', state, 'reason', reason, 'batchId', batch_id)
  FROM back WHERE state >= 5 ORDER BY outbox_id
)
SELECT id, kind, lane::int AS lane, seq, signed, state FROM back;

-- name: delivery.look_at
-- other: reads the cancels of what these nodes have in flight, and how soon a pending command of theirs falls due
(SELECT c.node_id, c.id AS cancelled_id, c.cancel_reason, NULL::bigint AS due_in_ms
 FROM commands c
 WHERE c.node_id = ANY (:node_ids::text[]) AND c.cancel_requested_at IS NOT NULL AND c.state IN (2, 3, 4)
 ORDER BY c.node_id, c.seq)
UNION ALL
-- What was abandoned a moment ago is to stop where it runs: it would hold its credit until its own time is over.
(SELECT c.node_id, c.id, c.reason, NULL
 FROM commands c JOIN node_sessions s ON s.node_id = c.node_id
 WHERE c.node_id = ANY (:node_ids::text[]) AND c.reason = 'abandoned' AND c.state = 6
   AND c.finished_at > compute_now() - interval '1 minute'
   AND c.session_id = s.session_id AND c.session_epoch = s.session_epoch)
UNION ALL
-- Rounded up: who asks again then finds it due.
SELECT c.node_id, NULL, NULL, ceil(1000 * extract(epoch FROM min(c.not_before) - compute_now()))::bigint
FROM commands c
WHERE c.node_id = ANY (:node_ids::text[]) AND c.state = 1
  AND c.not_before > compute_now() AND c.not_before <= compute_now() + ms(:ahead_ms) AND c.not_before > '-infinity'
  AND c.not_after > c.not_before
GROUP BY c.node_id;

-- name: delivery.nodes_with_work
-- other: the poll behind the notifications: nodes of this gateway with something to send, now or in a moment
SELECT s.node_id FROM node_sessions s
WHERE s.gateway_id = :gateway_id AND EXISTS (
  SELECT FROM commands c
  WHERE c.node_id = s.node_id AND c.state = 1 AND c.not_before IS NULL
    AND c.cancel_requested_at IS NULL AND c.not_after > compute_now())
UNION
-- What is held until somebody releases it has not_before = not_after, and never falls due. OFFSET 0 has each session
-- looked up by its node: a join may read all sessions of the gateway for each of thousands that fall due together.
SELECT s.node_id FROM commands c
CROSS JOIN LATERAL (SELECT o.node_id, o.gateway_id FROM node_sessions o WHERE o.node_id = c.node_id OFFSET 0) s
WHERE c.state = 1 AND c.not_before <= compute_now() + ms(:ahead_ms) AND c.not_before < 'infinity'
  AND c.not_after > greatest(c.not_before, compute_now()) AND s.gateway_id = :gateway_id
UNION
SELECT s.node_id FROM commands c JOIN node_sessions s ON s.node_id = c.node_id
WHERE c.cancel_requested_at IS NOT NULL AND c.state IN (2, 3, 4) AND s.gateway_id = :gateway_id
UNION
SELECT s.node_id FROM commands c JOIN node_sessions s ON s.node_id = c.node_id
WHERE c.reason = 'abandoned' AND c.state = 6 AND c.finished_at > compute_now() - interval '1 minute'
  AND s.gateway_id = :gateway_id;

-- name: delivery.expire
-- other: a controller's move of pending commands whose deadline has passed, which no session has anything to do with
WITH overdue AS MATERIALIZED (
  SELECT c.id FROM commands c
  -- The second bound excludes nothing: it names the index that only expiry may use.
  WHERE c.state = 1 AND c.not_after <= compute_now() AND c.not_after < 'infinity'
  ORDER BY c.not_after
  LIMIT :batch
), locked AS MATERIALIZED (
  SELECT c.id FROM commands c JOIN overdue ON overdue.id = c.id
  WHERE c.state = 1 AND c.not_after <= compute_now()
  ORDER BY c.id
  FOR NO KEY UPDATE OF c
), expired AS (
  UPDATE commands c
  -- Each time that it was sent was answered BUSY, or of one of them nothing was heard.
  SET state = 8, finished_at = compute_now(), reason = 'expired',
    message = CASE WHEN c.attempt > c.busy_count THEN :message_unsure ELSE :message END
  FROM locked WHERE c.id = locked.id
  RETURNING c.id, c.node_id, c.kind, c.state, c.reason, c.batch_id
), told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT numbered.outbox_id, :event_type, e.node_id,
    jsonb_build_object('commandId', e.id, 'kind', e.kind, 'state', e.state, 'reason', e.reason, 'batchId', e.batch_id)
  FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM expired) e
  JOIN unnest(:outbox_ids::text[]) WITH ORDINALITY AS numbered (outbox_id, n) ON numbered.n = e.n
  ORDER BY numbered.outbox_id
)
SELECT id, node_id FROM expired;
