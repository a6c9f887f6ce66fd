-- What is removed when it has been kept long enough, in batches small enough not to be noticed.

-- name: retention.commands
-- other: retention of what has ended
WITH old AS MATERIALIZED (
  SELECT c.id FROM commands c
  WHERE c.finished_at < compute_now() - ms(:older_than_ms)
  ORDER BY c.finished_at LIMIT :batch_size
), locked AS MATERIALIZED (
  SELECT c.id FROM commands c WHERE c.id = ANY (ARRAY (SELECT id FROM old))
  ORDER BY c.id
  FOR UPDATE SKIP LOCKED
), output AS (
  DELETE FROM command_output o USING locked WHERE o.command_id = locked.id
)
DELETE FROM commands c WHERE c.id = ANY (ARRAY (SELECT id FROM locked))
RETURNING c.id;

-- name: retention.certificates
-- other: retention; one that has expired long ago opens nothing, and proves nothing either
WITH expired AS MATERIALIZED (
  SELECT c.serial FROM node_certs c
  WHERE c.not_after < compute_now() - ms(:older_than_ms)
  ORDER BY c.not_after LIMIT :batch_size
), locked AS MATERIALIZED (
  SELECT c.serial FROM node_certs c WHERE c.serial = ANY (ARRAY (SELECT serial FROM expired))
  ORDER BY c.serial
  FOR UPDATE OF c SKIP LOCKED
)
DELETE FROM node_certs c WHERE c.serial = ANY (ARRAY (SELECT serial FROM locked))
RETURNING c.serial;

-- name: retention.join_tokens
-- other: retention of tokens that nobody can use any more, used or not
WITH locked AS MATERIALIZED (
  SELECT t.token_id FROM join_tokens t
  WHERE t.expires_at < compute_now() - ms(:older_than_ms)
  ORDER BY t.token_id LIMIT :batch_size
  FOR UPDATE SKIP LOCKED
)
DELETE FROM join_tokens t USING locked WHERE t.token_id = locked.token_id
RETURNING t.token_id;

-- name: retention.outbox
-- other: retention of what has been published
WITH locked AS MATERIALIZED (
  SELECT o.id FROM outbox o
  WHERE o.created_at < compute_now() - ms(:older_than_ms) AND o.position IS NOT NULL
  ORDER BY o.id LIMIT :batch_size
  FOR UPDATE SKIP LOCKED
)
DELETE FROM outbox o USING locked WHERE o.id = locked.id
RETURNING o.id;

-- name: retention.events
-- other: retention; the ack in node_sessions says how far a journal had come
WITH locked AS MATERIALIZED (
  SELECT e.node_id, e.journal_id, e.seq FROM node_events e
  WHERE e.received_at < compute_now() - ms(:older_than_ms)
  ORDER BY e.node_id, e.journal_id, e.seq LIMIT :batch_size
  FOR UPDATE SKIP LOCKED
)
DELETE FROM node_events e USING locked
WHERE e.node_id = locked.node_id AND e.journal_id = locked.journal_id AND e.seq = locked.seq
RETURNING e.seq;
