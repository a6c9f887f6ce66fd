-- The gateways' leases.

-- name: leases.claim
-- other: a gateway's own row, told by its token; repeatable, because a claim's answer may be lost
INSERT INTO leases (name, token, expires_at, advertise_url, internal_url, version, stream_limit)
VALUES (:name, :token, compute_now() + ms(:lifetime_ms), :advertise_url, :internal_url, :version, :stream_limit)
ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at, renewed_at = compute_now()
  WHERE leases.token = excluded.token AND leases.retired_at IS NULL
RETURNING name;

-- name: leases.renew
-- other: a gateway's own row, told by its token; no row: retired for good
UPDATE leases
   SET expires_at = compute_now() + ms(:lifetime_ms), renewed_at = compute_now(), stream_count = :stream_count,
       draining = :draining
 WHERE name = :name AND token = :token AND retired_at IS NULL
RETURNING to_ms(expires_at) AS expires_at_ms;

-- name: leases.release
-- other: an orderly stop of the gateway itself
UPDATE leases SET retired_at = compute_now(), expires_at = compute_now(), stream_count = 0
 WHERE name = :name AND token = :token AND retired_at IS NULL
RETURNING name;

-- name: leases.retire
-- other: by the liveness controller, in the transaction that moves the lost gateway's nodes
UPDATE leases SET retired_at = compute_now()
 WHERE name = :name AND retired_at IS NULL AND expires_at < compute_now() - ms(:expired_for_ms)
RETURNING name;

-- name: leases.list
-- other: read
SELECT name, to_ms(expires_at) AS expires_at_ms, advertise_url, internal_url, version, stream_count, stream_limit,
       draining, to_ms(started_at) AS started_at_ms, to_ms(renewed_at) AS renewed_at_ms,
       to_ms(retired_at) AS retired_at_ms, retired_at IS NULL AND expires_at > compute_now() AS live
  FROM leases
 WHERE :with_retired::boolean OR retired_at IS NULL
 ORDER BY name;

-- name: leases.delete_retired
-- other: retention
WITH locked AS (
  SELECT name FROM leases WHERE retired_at < compute_now() - ms(:retired_for_ms) ORDER BY name FOR UPDATE)
DELETE FROM leases l USING locked WHERE l.name = locked.name
RETURNING l.name;
