-- Sessions: the Hello transaction, liveness, closing. Lock order: node_sessions, nodes, node_certs, commands, inserts.

-- name: sessions.lock_for_hello
-- other: takes the lock under which everything else of the Hello is read, in statements after this one
SELECT s.node_id, (SELECT holds_lease(:gateway_id, :lease_token)) AS lease_held
FROM node_sessions s
WHERE s.node_id = :node_id
FOR NO KEY UPDATE OF s;

-- name: sessions.hello_facts
-- other: reads under the lock of sessions.lock_for_hello, and locks the commands that the plan will write
WITH reported AS MATERIALIZED (
  SELECT c.* FROM commands c
  WHERE c.node_id = :node_id AND (c.state IN (2, 3, 4) OR c.id = ANY (:reported_ids::text[]))
  ORDER BY c.id
  FOR NO KEY UPDATE OF c
)
SELECT
  to_ms(compute_now()) AS now_ms,
  (SELECT holds_lease(:gateway_id, :lease_token)) AS lease_held,
  (s.node_id IS NOT NULL) AS joined,
  s.gateway_id, s.session_id, s.session_epoch, s.boot_id, s.recent_boots, s.journal_id, s.hello_nonce, s.role,
  s.daemon_version, s.trust_version, s.acked_event_seq, s.heartbeat_interval_ms, s.duplicate_hellos,
  to_ms(s.duplicate_since) AS duplicate_since_ms, to_ms(s.last_seen) AS last_seen_ms,
  to_ms(s.disconnected_at) AS disconnected_at_ms, s.peer_address,
  n.identity_generation, n.spec_generation, n.spec_sha256, n.locked_by, n.lock_reason,
  to_ms(n.locked_until) AS locked_until_ms, n.revoked_by, n.revoked_reason,
  ARRAY (
    SELECT d.type FROM node_conditions d
    WHERE d.node_id = s.node_id AND d.source = 'inventory' AND d.status = 'true') AS conditions,
  (c.serial IS NOT NULL) AS certificate_recorded,
  c.revocation_reason, c.identity_generation AS certificate_generation, c.allowed_kinds,
  (c.superseded_at IS NOT NULL) AS certificate_superseded, (c.first_used_at IS NOT NULL) AS certificate_used,
  ARRAY (
    SELECT ROW (r.id, r.kind, r.lane::int, r.seq, r.state::int, r.attempt, r.sent_boot_id,
                r.cancel_requested_at IS NOT NULL, r.body, r.signature, r.batch_approval, r.batch_proof)
    FROM reported r WHERE r.state IN (2, 3, 4) ORDER BY r.seq) AS commands,
  ARRAY (
    SELECT ROW (i.section, i.sha256) FROM inventory_sections i WHERE i.node_id = s.node_id) AS sections
FROM (SELECT :node_id::text AS node_id) asked
LEFT JOIN node_sessions s ON s.node_id = asked.node_id
LEFT JOIN nodes n ON n.node_id = asked.node_id
LEFT JOIN node_certs c ON c.serial = :cert_serial AND c.node_id = asked.node_id;

-- name: sessions.apply_hello
-- other: takes the row over under the lock that it holds, so that there is no older epoch to compare with
WITH taken AS (
  UPDATE node_sessions s
  SET gateway_id = :gateway_id, session_id = :session_id, session_epoch = :session_epoch, boot_id = :boot_id,
    recent_boots = :recent_boots::jsonb, journal_id = :journal_id, hello_nonce = :hello_nonce, role = :role,
    daemon_version = :daemon_version, proto_max = :proto_max, trust_version = :trust_version,
    capabilities = :capabilities::text[], approver_set_epoch = :approver_set_epoch,
    approver_set_sha256 = :approver_set_sha256, acked_event_seq = :acked_event_seq, cert_serial = :cert_serial,
    upgrade_only = :upgrade_only, signed_only = :signed_only, heartbeat_interval_ms = :heartbeat_interval_ms,
    duplicate_hellos = :duplicate_hellos, duplicate_since = at_ms(:duplicate_since_ms), peer_address = :peer_address,
    connected_at = compute_now(), last_seen = compute_now(), disconnected_at = NULL
  WHERE s.node_id = :node_id AND (SELECT holds_lease(:gateway_id, :lease_token))
  RETURNING s.node_id
), connected AS (
  UPDATE nodes n
  SET state = 'connected', state_reason = '',
    state_changed_at = CASE WHEN n.state = 'connected' THEN n.state_changed_at ELSE compute_now() END,
    observed_generation = greatest(n.observed_generation, :observed_generation::bigint, :applied_generation::bigint),
    applied_generation = greatest(n.applied_generation, :applied_generation::bigint)
  FROM taken
  WHERE n.node_id = taken.node_id
), certificates AS MATERIALIZED (
  SELECT c.serial FROM node_certs c, taken, node_certs p
  WHERE :first_use::boolean AND p.serial = :cert_serial AND c.node_id = taken.node_id AND c.superseded_at IS NULL
    AND c.identity_generation = p.identity_generation AND c.issued_at <= p.issued_at
  ORDER BY c.serial
  FOR NO KEY UPDATE OF c
), used AS (
  UPDATE node_certs c
  SET first_used_at = CASE WHEN c.serial = :cert_serial THEN compute_now() ELSE c.first_used_at END,
    superseded_at = CASE WHEN c.serial = :cert_serial THEN NULL ELSE compute_now() END
  FROM certificates
  WHERE c.serial = certificates.serial
), planned AS MATERIALIZED (
  SELECT u.*
  FROM unnest(:command_ids::text[], :attempts::int[], :end_states::smallint[], :end_reasons::text[],
    :end_messages::text[], :held_back::boolean[]) AS u (id, attempt, end_state, end_reason, end_message, held_back)
), locked AS MATERIALIZED (
  SELECT c.id FROM commands c, taken
  WHERE c.id IN (SELECT id FROM planned) AND c.node_id = taken.node_id AND c.state IN (2, 3, 4)
  ORDER BY c.id
  FOR NO KEY UPDATE OF c
), moved AS (
  UPDATE commands c
  SET session_epoch = CASE WHEN p.end_state IS NULL THEN :session_epoch ELSE c.session_epoch END,
    session_id = CASE WHEN p.end_state IS NULL THEN :session_id ELSE c.session_id END,
    attempt = coalesce(p.attempt, c.attempt),
    sent_boot_id = CASE WHEN p.attempt IS NULL THEN c.sent_boot_id ELSE :boot_id END,
    dispatched_at = CASE WHEN p.attempt IS NULL THEN c.dispatched_at ELSE compute_now() END,
    state = coalesce(p.end_state, c.state), reason = coalesce(p.end_reason, c.reason),
    message = coalesce(p.end_message, c.message), held_back = p.held_back,
    finished_at = CASE WHEN p.end_state IS NULL THEN NULL ELSE compute_now() END
  FROM locked, planned p
  WHERE c.id = locked.id AND p.id = c.id
  RETURNING c.id
), unlabelled AS (
  DELETE FROM node_labels l USING taken
  WHERE l.node_id = taken.node_id AND l.source = 'system' AND starts_with(l.key, 'bc.dev/cap.')
    AND l.key <> ALL (:capability_labels::text[])
), labelled AS (
  INSERT INTO node_labels (node_id, source, key, value)
  SELECT taken.node_id, 'system', key, '1' FROM taken, unnest(:capability_labels::text[]) AS u (key) ORDER BY key
  ON CONFLICT DO NOTHING
), unhashed AS (
  DELETE FROM inventory_hashes h USING taken
  WHERE h.node_id = taken.node_id AND h.section <> ALL (:sections::text[])
), hashed AS (
  INSERT INTO inventory_hashes AS h (node_id, section, sha256)
  SELECT taken.node_id, u.section, u.sha256
  FROM taken, unnest(:sections::text[], :section_hashes::bytea[]) AS u (section, sha256) ORDER BY u.section
  ON CONFLICT (node_id, section) DO UPDATE SET sha256 = excluded.sha256, reported_at = compute_now()
  WHERE h.sha256 <> excluded.sha256
), conditions AS (
  INSERT INTO node_conditions AS d (node_id, type, source, status, reason, message)
  SELECT taken.node_id, u.type, 'inventory', u.status, u.reason, u.message
  FROM taken, unnest(:condition_types::text[], :condition_statuses::text[], :condition_reasons::text[],
    :condition_messages::text[]) AS u (type, status, reason, message)
  ORDER BY u.type
  ON CONFLICT (node_id, type) DO UPDATE
  SET status = excluded.status, reason = excluded.reason, message = excluded.message, updated_at = compute_now(),
    changed_at = CASE WHEN d.status = excluded.status THEN d.changed_at ELSE compute_now() END
), gap AS (
  -- A node that was forgotten begins at 1 again: what is known to be missing from there on is told no second time, and
  -- does not hide what is missing behind it.
  INSERT INTO node_event_gaps (node_id, journal_id, first_seq, last_seq)
  SELECT taken.node_id, :journal_id, known.first_seq, :gap_last_seq::bigint
  FROM taken CROSS JOIN LATERAL (
    WITH RECURSIVE told_gaps (next_seq) AS (
      SELECT :gap_first_seq::bigint
      UNION ALL
      SELECT g.last_seq + 1 FROM told_gaps AS t JOIN node_event_gaps g
        ON g.node_id = taken.node_id AND g.journal_id = :journal_id AND g.first_seq = t.next_seq
    )
    SELECT max(next_seq) AS first_seq FROM told_gaps
  ) AS known
  WHERE known.first_seq <= :gap_last_seq::bigint
), told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT u.id, u.type, taken.node_id, u.payload::jsonb
  FROM taken, unnest(:outbox_ids::text[], :outbox_types::text[], :outbox_payloads::text[]) AS u (id, type, payload)
  ORDER BY u.id
)
SELECT taken.node_id, (SELECT count(*) FROM moved) AS moved,
  (SELECT count(pg_notify(u.channel, u.payload))
   FROM unnest(:notify_channels::text[], :notify_payloads::text[]) AS u (channel, payload)) AS notified
FROM taken;

-- name: sessions.refuse_hello
-- other: what a refused Hello still commits, under the lock of sessions.lock_for_hello and the lease
WITH allowed AS MATERIALIZED (
  SELECT s.node_id FROM node_sessions s
  WHERE s.node_id = :node_id AND (SELECT holds_lease(:gateway_id, :lease_token))
), reset AS (
  UPDATE node_sessions s SET duplicate_hellos = 0, duplicate_since = NULL
  FROM allowed WHERE s.node_id = allowed.node_id AND :reset_duplicates::boolean
), quarantined AS (
  UPDATE nodes n SET quarantined_at = compute_now(), quarantine_reason = :revocation_reason
  FROM allowed WHERE n.node_id = allowed.node_id AND :revocation_reason::text IS NOT NULL
), certificates AS MATERIALIZED (
  SELECT c.serial FROM node_certs c, allowed
  WHERE :revocation_reason::text IS NOT NULL AND c.node_id = allowed.node_id AND c.revoked_at IS NULL
    AND c.identity_generation = :revoked_generation AND c.not_after > compute_now()
  ORDER BY c.serial
  FOR NO KEY UPDATE OF c
), revoked AS (
  UPDATE node_certs c SET revoked_at = compute_now(), revocation_reason = :revocation_reason,
    revocation_notice = :revocation_notice
  FROM certificates WHERE c.serial = certificates.serial
  RETURNING c.serial
), serials AS MATERIALIZED (
  SELECT coalesce(jsonb_agg(serial ORDER BY serial), '[]') AS list FROM revoked
), conditions AS (
  INSERT INTO node_conditions AS d (node_id, type, source, status, reason, message)
  SELECT allowed.node_id, u.type, 'inventory', u.status, u.reason, u.message
  FROM allowed, unnest(:condition_types::text[], :condition_statuses::text[], :condition_reasons::text[],
    :condition_messages::text[]) AS u (type, status, reason, message)
  ORDER BY u.type
  ON CONFLICT (node_id, type) DO UPDATE
  SET status = excluded.status, reason = excluded.reason, message = excluded.message, updated_at = compute_now(),
    changed_at = CASE WHEN d.status = excluded.status THEN d.changed_at ELSE compute_now() END
), told AS (
  INSERT INTO outbox (id, type, node_id, payload)
  SELECT u.id, u.type, allowed.node_id,
    CASE WHEN u.type = :quarantine_event THEN u.payload::jsonb || jsonb_build_object('serials', serials.list)
         ELSE u.payload::jsonb END
  FROM allowed, serials,
    unnest(:outbox_ids::text[], :outbox_types::text[], :outbox_payloads::text[]) AS u (id, type, payload)
  ORDER BY u.id
)
SELECT allowed.node_id, ARRAY (SELECT jsonb_array_elements_text(list) FROM serials) AS serials,
  (SELECT count(pg_notify(u.channel, u.payload))
   FROM unnest(:notify_channels::text[], :notify_payloads::text[]) AS u (channel, payload)) AS notified
FROM allowed;

-- name: sessions.flush_last_seen
-- fenced
WITH said AS MATERIALIZED (
  SELECT u.* FROM unnest(:node_ids::text[], :session_ids::text[], :session_epochs::bigint[], :ages_ms::bigint[])
    AS u (node_id, session_id, session_epoch, age_ms)
), locked AS MATERIALIZED (
  SELECT s.node_id, said.age_ms FROM node_sessions s JOIN said ON said.node_id = s.node_id
  WHERE s.session_epoch = said.session_epoch AND s.session_id = said.session_id AND s.gateway_id = :gateway_id
    AND (SELECT holds_lease(:gateway_id, :lease_token))
  ORDER BY s.node_id
  FOR NO KEY UPDATE OF s
), flushed AS (
  UPDATE node_sessions s SET last_seen = compute_now() - ms(locked.age_ms)
  FROM locked WHERE s.node_id = locked.node_id
  RETURNING s.node_id
)
SELECT (SELECT holds_lease(:gateway_id, :lease_token)) AS lease_held, ARRAY (SELECT node_id FROM flushed) AS node_ids;

-- name: sessions.disconnect
-- fenced
WITH said AS MATERIALIZED (
  SELECT u.* FROM unnest(:node_ids::text[], :session_ids::text[], :session_epochs::bigint[], :reasons::text[],
    :outbox_ids::text[], :outbox_payloads::text[])
    AS u (node_id, session_id, session_epoch, reason, outbox_id, outbox_payload)
), locked AS MATERIALIZED (
  SELECT said.* FROM node_sessions s JOIN said ON said.node_id = s.node_id
  WHERE s.session_epoch = said.session_epoch AND s.session_id = said.session_id AND s.gateway_id = :gateway_id
    AND (SELECT holds_lease(:gateway_id, :lease_token))
  ORDER BY s.node_id
  FOR NO KEY UPDATE OF s
), closed AS (
  -- An orderly close ends the live window in which another boot id would count as a duplicate.
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
SELECT (SELECT holds_lease(:gateway_id, :lease_token)) AS lease_held, ARRAY (SELECT node_id FROM locked) AS node_ids,
  pg_notify(:outbox_channel, '') AS notified;

-- name: sessions.newer_specs
-- other: reads what the sessions of this gateway have not been offered yet
SELECT n.node_id, n.spec_generation, n.spec_body, n.spec_signature, p.patch_base, p.patch_body, p.patch_signature
FROM unnest(:node_ids::text[], :generations::bigint[]) AS u (node_id, generation)
JOIN nodes n ON n.node_id = u.node_id
LEFT JOIN node_specs p ON p.node_id = n.node_id AND p.generation = n.spec_generation
WHERE n.spec_generation > u.generation;

-- name: sessions.recently_published_specs
-- other: the poll behind the notification of a newer spec
SELECT n.node_id
FROM nodes n JOIN node_sessions s ON s.node_id = n.node_id
WHERE n.spec_updated_at > compute_now() - ms(:window_ms) AND s.gateway_id = :gateway_id;

-- name: sessions.server_time
-- other: asks the only clock of record
SELECT to_ms(compute_now()) AS now_ms;
