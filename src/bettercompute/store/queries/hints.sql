-- Notifications alone in their transaction, after what they tell of has been committed.

-- name: hints.tell
-- other: only hints, each behind a poll; nothing of this transaction need survive, so its commit waits for no disk
SELECT set_config('synchronous_commit', 'off', true), count(pg_notify(u.channel, u.payload))
FROM unnest(:channels::text[], :payloads::text[]) AS u (channel, payload);
