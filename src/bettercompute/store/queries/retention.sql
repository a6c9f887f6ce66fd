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

-- name: retention.approvals
-- other: retention; who approved a batch is kept as long as the last of its commands
WITH ended AS MATERIALIZED (
  SELECT a.batch_id FROM approval_batches a
  WHERE a.not_after < compute_now() - ms(:older_than_ms)
    AND NOT EXISTS (SELECT FROM commands c WHERE c.batch_id = a.batch_id)
  ORDER BY a.not_after LIMIT :batch_size
), locked AS MATERIALIZED (
  SELECT a.batch_id FROM approval_batches a WHERE a.batch_id = ANY (ARRAY (SELECT batch_id FROM ended))
  ORDER BY a.batch_id
  FOR UPDATE SKIP LOCKED
)
DELETE FROM approval_batches a USING locked WHERE a.batch_id = locked.batch_id
RETURNING a.batch_id;

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
WITH expired AS MATERIALIZED (
  SELECT t.token_id FROM join_tokens t
  WHERE t.expires_at < compute_now() - ms(:older_than_ms)
  ORDER BY t.expires_at LIMIT :batch_size
), locked AS MATERIALIZED (
  SELECT t.token_id FROM join_tokens t WHERE t.token_id = ANY (ARRAY (SELECT token_id FROM expired))
  ORDER BY t.token_id
  FOR UPDATE SKIP LOCKED
)
DELETE FROM join_tokens t USING locked WHERE t.token_id = locked.token_id
RETURNING t.token_id;

-- name: retention.outbox
-- other: retention of what has been published, from the first position on: positions rise with age
WITH first AS MATERIALIZED (
  SELECT o.id, o.created_at FROM outbox o WHERE o.position > 0 ORDER BY o.position LIMIT :batch_size
), locked AS MATERIALIZED (
  SELECT o.id FROM outbox o
  WHERE o.id = ANY (ARRAY (SELECT id FROM first WHERE created_at < compute_now() - ms(:older_than_ms)))
  ORDER BY o.id
  FOR UPDATE SKIP LOCKED
)
DELETE FROM outbox o WHERE o.id = ANY (ARRAY (SELECT id FROM locked))
RETURNING o.id;

-- name: retention.events
-- other: retention; the ack in node_sessions says how far a journal had come
WITH locked AS MATERIALIZED (
  SELECT e.ctid AS place FROM node_events e
  WHERE e.received_at < compute_now() - ms(:older_than_ms)
  ORDER BY e.received_at LIMIT :batch_size
  FOR UPDATE SKIP LOCKED
)
-- A locked row stays where it is, so that its place finds it again without a second index.
DELETE FROM node_events e WHERE e.ctid = ANY (ARRAY (SELECT place FROM locked))
RETURNING e.seq;

-- name: retention.event_gaps
-- other: retention; a node has few, one for each stretch that its journal had to drop
WITH locked AS MATERIALIZED (
  SELECT g.ctid AS place FROM node_event_gaps g
  WHERE g.noticed_at < compute_now() - ms(:older_than_ms)
  ORDER BY g.noticed_at
  LIMIT :batch_size
  FOR UPDATE SKIP LOCKED
)
DELETE FROM node_event_gaps g WHERE g.ctid = ANY (ARRAY (SELECT place FROM locked))
RETURNING g.first_seq;
