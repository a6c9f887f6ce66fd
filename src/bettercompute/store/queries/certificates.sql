-- Node certificates: what was issued, used, superseded and revoked.

-- name: certificates.insert
-- other: issued by Join or Renew, or found at a node and not on record
INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after, issued_at,
                        allowed_kinds)
VALUES (:serial, :node_id, :identity_generation, :csr_sha256, :chain, at_ms(:not_before_ms), at_ms(:not_after_ms),
        coalesce(at_ms(:issued_at_ms::bigint), compute_now()), :allowed_kinds::text[]);

-- name: certificates.find
-- other: read
SELECT serial, node_id, identity_generation, csr_sha256, chain, to_ms(not_before) AS not_before_ms,
       to_ms(not_after) AS not_after_ms, to_ms(issued_at) AS issued_at_ms, allowed_kinds,
       to_ms(first_used_at) AS first_used_at_ms, to_ms(superseded_at) AS superseded_at_ms,
       to_ms(revoked_at) AS revoked_at_ms, revocation_reason
  FROM node_certs WHERE serial = :serial;

-- name: certificates.find_by_request
-- other: read
SELECT serial, node_id, identity_generation, csr_sha256, chain, to_ms(not_before) AS not_before_ms,
       to_ms(not_after) AS not_after_ms, to_ms(issued_at) AS issued_at_ms, allowed_kinds,
       to_ms(first_used_at) AS first_used_at_ms, to_ms(superseded_at) AS superseded_at_ms,
       to_ms(revoked_at) AS revoked_at_ms, revocation_reason
  FROM node_certs WHERE node_id = :node_id AND csr_sha256 = :csr_sha256;

-- name: certificates.of_node
-- other: read, newest first
SELECT serial, node_id, identity_generation, csr_sha256, chain, to_ms(not_before) AS not_before_ms,
       to_ms(not_after) AS not_after_ms, to_ms(issued_at) AS issued_at_ms, allowed_kinds,
       to_ms(first_used_at) AS first_used_at_ms, to_ms(superseded_at) AS superseded_at_ms,
       to_ms(revoked_at) AS revoked_at_ms, revocation_reason
  FROM node_certs WHERE node_id = :node_id
 ORDER BY issued_at DESC, serial DESC
 LIMIT :page_size;

-- name: certificates.revoke_generation
-- other: every serial of one identity, expired ones too; runs under the session row's lock
WITH locked AS (
  SELECT serial FROM node_certs
   WHERE node_id = :node_id AND identity_generation = :identity_generation AND revoked_at IS NULL
   ORDER BY serial FOR NO KEY UPDATE)
UPDATE node_certs c
   SET revoked_at = compute_now(), revocation_reason = :reason, revocation_notice = :notice::bytea
  FROM locked WHERE c.serial = locked.serial
RETURNING c.serial;

-- name: certificates.revoked_since
-- other: read by every gateway; expired ones are refused without it
SELECT serial, node_id, to_ms(revoked_at) AS revoked_at_ms, revocation_reason, revocation_notice
  FROM node_certs
 WHERE revoked_at IS NOT NULL AND revoked_at >= at_ms(:since_ms) AND not_after > compute_now()
 ORDER BY revoked_at, serial;

-- name: certificates.notify_revoked
-- other: a hint for the gateways
SELECT pg_notify(:channel, payload) FROM unnest(:payloads::text[]) AS payload;

-- name: certificates.supersede
-- other: serials that were issued and never used make room; runs under the session row's lock
WITH locked AS (
  SELECT serial FROM node_certs
   WHERE node_id = :node_id AND serial = ANY (:serials::text[]) AND superseded_at IS NULL
   ORDER BY serial FOR NO KEY UPDATE)
UPDATE node_certs c SET superseded_at = compute_now() FROM locked WHERE c.serial = locked.serial;

-- name: certificates.withdraw
-- other: it was issued and never used, and its request is answered anew; runs under the session row's lock
DELETE FROM node_certs WHERE serial = :serial AND first_used_at IS NULL;
