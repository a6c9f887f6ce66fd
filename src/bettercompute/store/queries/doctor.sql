-- What `doctor` asks: facts about this moment, each bounded by how many are named, never by the size of the fleet.

-- name: doctor.server
-- other: read
SELECT to_ms(compute_now()) AS now_ms, pg_notification_queue_usage() AS notify_queue_share;

-- name: doctor.gateways
-- other: read; a handful of rows
SELECT name, to_ms(compute_now()) - to_ms(expires_at) AS expired_for_ms, draining OR drain_requested_at IS NOT NULL AS draining,
       to_ms(compute_now()) - to_ms(started_at) AS age_ms, clock_offset_ms, revocations_age_ms,
       to_ms(serving_not_after) - to_ms(compute_now()) AS serving_left_ms
  FROM leases WHERE retired_at IS NULL
 ORDER BY name;

-- name: doctor.oldest_unnumbered
-- other: read; the event that waits longest for its place in the stream
SELECT to_ms(compute_now()) - to_ms(created_at) AS age_ms FROM outbox WHERE position IS NULL ORDER BY id LIMIT 1;

-- name: doctor.conditions
-- other: read; what nodes have reported of themselves
SELECT node_id, type, reason FROM node_conditions
 WHERE status = 'true' AND type = ANY (:types::text[])
 ORDER BY type, node_id LIMIT :named_max;

-- name: doctor.expiring
-- other: read; connected nodes that should have renewed long ago
SELECT c.node_id, to_ms(c.not_after) - to_ms(compute_now()) AS left_ms
  FROM node_certs c JOIN node_sessions s ON s.node_id = c.node_id
 WHERE c.superseded_at IS NULL AND c.revoked_at IS NULL AND s.gateway_id IS NOT NULL
   AND c.not_after > compute_now() AND c.not_after < compute_now() + ms(:within_ms)
   AND c.not_after - compute_now() < (c.not_after - c.issued_at) / 6
   AND NOT EXISTS (SELECT FROM node_certs y WHERE y.node_id = c.node_id AND y.superseded_at IS NULL
                      AND y.revoked_at IS NULL AND y.not_after > c.not_after)
 ORDER BY c.not_after LIMIT :named_max;

-- name: doctor.locked_out
-- other: read; of the nodes that are away those that no certificate brings back
SELECT n.node_id
  FROM (SELECT node_id, identity_generation, quarantined_at, revoked_at FROM nodes
         WHERE state IN ('disconnected', 'unreachable') ORDER BY node_id LIMIT :looked_at_max) n
 WHERE n.quarantined_at IS NULL AND n.revoked_at IS NULL
   AND NOT EXISTS (SELECT FROM node_certs c WHERE c.node_id = n.node_id AND c.identity_generation = n.identity_generation
                      AND c.superseded_at IS NULL AND c.revoked_at IS NULL
                      AND c.not_after > compute_now() - ms(:comes_back_ms::bigint))
 ORDER BY n.node_id LIMIT :named_max;

-- name: doctor.quarantined
-- other: read
SELECT node_id, quarantine_reason AS reason FROM nodes WHERE quarantined_at IS NOT NULL
 ORDER BY node_id LIMIT :named_max;

-- name: doctor.unsettled
-- other: read; nodes whose sessions end again and again, from the newest events of that kind
SELECT node_id, count(*) AS ends
  FROM (SELECT node_id, type FROM outbox WHERE created_at > compute_now() - ms(:within_ms)
         ORDER BY created_at DESC LIMIT :looked_at_max) newest
 WHERE type = :event_type
 GROUP BY node_id HAVING count(*) >= :ends_min
 ORDER BY count(*) DESC, node_id LIMIT :named_max;

-- name: doctor.behind
-- other: read; connected nodes that hold an older trust bundle
SELECT s.node_id FROM node_sessions s
 WHERE s.gateway_id IS NOT NULL AND s.trust_version < :version::bigint
 ORDER BY s.node_id LIMIT :named_max;

-- name: doctor.other_set
-- other: read; connected nodes that enforce another approver set than the one published
SELECT s.node_id, s.trust_version FROM node_sessions s
 WHERE s.gateway_id IS NOT NULL
   AND (s.approver_set_epoch IS DISTINCT FROM :epoch::bigint OR s.approver_set_sha256 IS DISTINCT FROM :sha256::bytea)
 ORDER BY s.node_id LIMIT :named_max;
