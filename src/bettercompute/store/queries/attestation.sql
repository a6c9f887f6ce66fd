-- Verifying what nodes have signed. Gateways may not write these columns.

-- name: attestation.due_updates
-- other: read by the controller; the certificates that the node may have signed with, newest first
SELECT c.id AS command_id, c.node_id, c.kind, c.state::int AS state, c.result, c.update_signature,
       c.dispatched_at IS NOT NULL AS sent,
       ARRAY(SELECT s.chain FROM node_certs s
              WHERE s.node_id = c.node_id AND s.not_after > c.created_at AND s.not_before <= c.finished_at
                AND (s.revoked_at IS NULL OR s.revoked_at > c.created_at)
              ORDER BY s.issued_at DESC LIMIT 8) AS chains
  FROM commands c
 WHERE c.attestation = 'expected' AND c.state >= 5
 ORDER BY c.id
 LIMIT :page_size;

-- name: attestation.record_updates
-- other: written once; a row that somebody judged meanwhile is left alone
WITH judged AS MATERIALIZED (
  SELECT u.* FROM unnest(:command_ids::text[], :attestations::text[], :reasons::text[])
    AS u (id, attestation, reason)
), held AS MATERIALIZED (
  SELECT c.id FROM commands c JOIN judged USING (id)
   WHERE c.attestation = 'expected'
   ORDER BY c.id
   FOR NO KEY UPDATE OF c
)
UPDATE commands c SET attestation = judged.attestation, attestation_reason = judged.reason
  FROM held JOIN judged USING (id)
 WHERE c.id = held.id
RETURNING c.id;

-- name: attestation.due_reports
-- other: read by the controller
SELECT t.node_id, t.report, to_ms(compute_now()) AS now_ms, t.received_at::text AS received_at,
       to_ms(t.attested_at) AS attested_at_ms, t.attestation,
       ARRAY(SELECT s.chain FROM node_certs s
              WHERE s.node_id = t.node_id AND s.not_after > t.received_at - interval '1 day'
                AND (s.revoked_at IS NULL OR s.revoked_at > t.received_at)
              ORDER BY s.issued_at DESC LIMIT 8) AS chains
  FROM node_status t
 WHERE t.judged_at IS DISTINCT FROM t.received_at
 ORDER BY t.node_id
 LIMIT :page_size;

-- name: attestation.record_reports
-- other: written for the report that was read; a newer one waits for the next run
WITH judged AS MATERIALIZED (
  SELECT u.* FROM unnest(:node_ids::text[], :received_ats::text[], :attestations::text[], :reasons::text[],
    :bodies::bytea[], :attested_at_ms::bigint[]) AS u (node_id, received_at, attestation, reason, body, at_ms)
), held AS MATERIALIZED (
  SELECT t.node_id FROM node_status t JOIN judged USING (node_id)
   ORDER BY t.node_id
   FOR NO KEY UPDATE OF t
)
UPDATE node_status t
   SET judged_at = judged.received_at::timestamptz, attestation = judged.attestation,
       attestation_reason = judged.reason, attested_body = coalesce(judged.body, t.attested_body),
       attested_at = coalesce(at_ms(judged.at_ms), t.attested_at)
  FROM held JOIN judged USING (node_id)
 WHERE t.node_id = held.node_id AND t.received_at = judged.received_at::timestamptz
RETURNING t.node_id;

-- name: attestation.of_node
-- other: read
SELECT report, attestation, attestation_reason, attested_body, to_ms(attested_at) AS attested_at_ms
  FROM node_status WHERE node_id = :node_id;
