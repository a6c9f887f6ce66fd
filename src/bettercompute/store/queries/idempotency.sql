-- Requests that were made before: the same key gets the same answer.

-- name: idempotency.claim
-- other: a second request waits here for the first to commit
INSERT INTO idempotency_keys (principal, key, request_sha256, response)
VALUES (:principal, :key, :request_sha256, 'null')
ON CONFLICT (principal, key) DO NOTHING
RETURNING key;

-- name: idempotency.get
-- other: read
SELECT request_sha256, response::text AS response FROM idempotency_keys WHERE principal = :principal AND key = :key;

-- name: idempotency.complete
-- other: in the transaction of the claim
UPDATE idempotency_keys SET response = :response::text::jsonb WHERE principal = :principal AND key = :key;

-- name: idempotency.delete_old
-- other: retention
WITH locked AS MATERIALIZED (
  SELECT k.ctid AS place FROM idempotency_keys k
   WHERE k.created_at < compute_now() - ms(:older_than_ms)
   ORDER BY k.created_at LIMIT :batch_size FOR UPDATE SKIP LOCKED)
-- A locked row stays where it is, so that its place finds it again.
DELETE FROM idempotency_keys k WHERE k.ctid = ANY (ARRAY (SELECT place FROM locked))
RETURNING k.key;
