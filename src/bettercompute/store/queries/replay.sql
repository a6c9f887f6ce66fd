-- What may be used once, on any gateway and over restarts.

-- name: replay.consume
-- other: the one statement that decides who uses it
INSERT INTO replay_cache (purpose, jti, expires_at) VALUES (:purpose, :jti, at_ms(:expires_at_ms))
ON CONFLICT (purpose, jti) DO NOTHING
RETURNING jti;

-- name: replay.delete_expired
-- other: retention; kept a while past expiry for clocks that disagree
WITH locked AS (
  SELECT purpose, jti FROM replay_cache
   WHERE expires_at < compute_now() - ms(:kept_after_expiry_ms)
   ORDER BY purpose, jti LIMIT :batch_size FOR UPDATE SKIP LOCKED)
DELETE FROM replay_cache r USING locked WHERE r.purpose = locked.purpose AND r.jti = locked.jti
RETURNING r.jti;
