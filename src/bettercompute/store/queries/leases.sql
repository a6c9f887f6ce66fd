-- The gateways' leases.

-- name: leases.claim
-- other: a gateway's own row, told by its token; repeatable, because a claim's answer may be lost
INSERT INTO leases (name, token, expires_at, advertise_url, internal_url, version, stream_limit, draining,
                    drain_requested_at, drain_requested_by)
VALUES (:name, :token, compute_now() + ms(:lifetime_ms), :advertise_url, :internal_url, :version, :stream_limit,
        :drain_requested_by::text IS NOT NULL,
        CASE WHEN :drain_requested_by::text IS NOT NULL THEN compute_now() END, :drain_requested_by)
ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at, renewed_at = compute_now()
  WHERE leases.token = excluded.token AND leases.retired_at IS NULL
RETURNING name;

-- name: leases.renew
-- other: a gateway's own row, told by its token; no row: retired for good
UPDATE leases
   SET expires_at = compute_now() + ms(:lifetime_ms), renewed_at = compute_now(), stream_count = :stream_count,
       draining = :draining, clock_offset_ms = :wall_ms::bigint - to_ms(compute_now()),
       revocations_age_ms = :revocations_age_ms, serving_not_after = at_ms(:serving_not_after_ms::bigint),
       serving_ca_sha256 = :serving_ca_sha256, node_cas_sha256 = :node_cas_sha256::text[]
 WHERE name = :name AND token = :token AND retired_at IS NULL
RETURNING drain_requested_by, database_timeline() AS timeline;

-- name: leases.timeline
-- other: read
SELECT database_timeline() AS timeline;

-- name: leases.release
-- other: an orderly stop of the gateway itself
UPDATE leases SET retired_at = compute_now(), expires_at = compute_now(), stream_count = 0
 WHERE name = :name AND token = :token AND retired_at IS NULL
RETURNING name;

-- name: leases.request_drain
-- other: an operator's wish, which the gateway follows at its next renewal; the first one's name and time stay
UPDATE leases
   SET drain_requested_at = coalesce(drain_requested_at, compute_now()),
       drain_requested_by = coalesce(drain_requested_by, :requested_by)
 WHERE name = :name AND retired_at IS NULL
RETURNING name, pg_notify(:channel, name) AS notified;

-- name: leases.undo_drain
-- other: an operator's wish, which the gateway follows at its next renewal
UPDATE leases SET drain_requested_at = NULL, drain_requested_by = NULL
 WHERE name = :name AND retired_at IS NULL
RETURNING name, pg_notify(:channel, name) AS notified;

-- name: leases.retire
-- other: by the liveness controller, in the transaction that moves the lost gateway's nodes
UPDATE leases SET retired_at = compute_now()
 WHERE name = :name AND retired_at IS NULL AND expires_at < compute_now() - ms(:expired_for_ms)
RETURNING name;

-- name: leases.list
-- other: read
SELECT name, to_ms(expires_at) AS expires_at_ms, advertise_url, internal_url, version, stream_count, stream_limit,
       draining AS refuses, draining OR drain_requested_at IS NOT NULL AS draining, to_ms(drain_requested_at) AS drain_requested_at_ms,
       drain_requested_by, to_ms(started_at) AS started_at_ms, to_ms(renewed_at) AS renewed_at_ms,
       to_ms(retired_at) AS retired_at_ms, retired_at IS NULL AND expires_at > compute_now() AS live
  FROM leases
 WHERE (:with_retired::boolean OR retired_at IS NULL) AND (:name::text IS NULL OR name = :name)
 ORDER BY name;

-- name: leases.held
-- other: read; the nodes whose session is a gateway's by their rows, counted, and the first of them by name
SELECT count(*) AS nodes, coalesce((array_agg(node_id ORDER BY node_id))[1:(:names_max::int)], '{}') AS names
  FROM node_sessions
 WHERE gateway_id = :name;

-- name: leases.delete_retired
-- other: retention
WITH locked AS (
  SELECT name FROM leases WHERE retired_at < compute_now() - ms(:retired_for_ms) ORDER BY name FOR UPDATE)
DELETE FROM leases l USING locked WHERE l.name = locked.name
RETURNING l.name;
