-- What may be used once, on any gateway and over restarts.

-- name: replay.consume
-- other: the one statement that decides who uses it
INSERT INTO replay_cache (purpose, jti, expires_at) VALUES (:purpose, :jti, at_ms(:expires_at_ms))
ON CONFLICT (purpose, jti) DO NOTHING
RETURNING jti;

-- name: replay.delete_expired
-- other: retention; kept a while past expiry for clocks that disagree
WITH locked AS MATERIALIZED (
  SELECT r.ctid AS place FROM replay_cache r
   WHERE r.expires_at < compute_now() - ms(:kept_after_expiry_ms)
   ORDER BY r.expires_at LIMIT :batch_size FOR UPDATE SKIP LOCKED)
-- A locked row stays where it is, so that its place finds it again.
DELETE FROM replay_cache r WHERE r.ctid = ANY (ARRAY (SELECT place FROM locked))
RETURNING r.jti;
