-- Published events: written with what they tell of, given their place after the commit.

-- name: outbox.insert
-- other: in the transaction of what it tells of
INSERT INTO outbox (id, type, node_id, payload)
SELECT v.id, v.type, v.node_id, v.payload::jsonb
  FROM unnest(:ids::text[], :types::text[], :node_ids::text[], :payloads::text[]) AS v (id, type, node_id, payload)
 ORDER BY v.id
ON CONFLICT (id) DO NOTHING;

-- name: outbox.notify
-- other: a hint for the publisher or the readers
SELECT pg_notify(:channel, :payload);

-- name: outbox.any_waiting
-- other: the publisher's look before it takes its turn
SELECT EXISTS (SELECT FROM outbox WHERE position IS NULL) AS found;

-- name: outbox.lock_publisher
-- other: makes the publisher one; a statement of its own, so that the next one sees every row committed before
SELECT last_position FROM outbox_publisher FOR NO KEY UPDATE;

-- name: outbox.assign
-- other: the publisher, holding outbox.lock_publisher
WITH waiting AS (
  SELECT id FROM outbox WHERE position IS NULL ORDER BY id LIMIT :batch_size FOR NO KEY UPDATE),
numbered AS (
  SELECT id, :last_position::bigint + row_number() OVER (ORDER BY id) AS position FROM waiting)
UPDATE outbox o SET position = numbered.position FROM numbered WHERE o.id = numbered.id
RETURNING o.position;

-- name: outbox.advance
-- other: the publisher, holding outbox.lock_publisher
UPDATE outbox_publisher SET last_position = :last_position;

-- name: outbox.read_from
-- other: read
SELECT id, type, node_id, payload::text AS payload, to_ms(created_at) AS created_at_ms, position
  FROM outbox
 WHERE position > :after_position
 ORDER BY position
 LIMIT :page_size;

-- name: outbox.bounds
-- other: read; positions before the first were removed by retention
SELECT (SELECT min(position) FROM outbox) AS first_position,
       (SELECT last_position FROM outbox_publisher) AS last_position;
