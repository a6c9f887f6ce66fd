-- What nodes told of themselves, read by people. The gateway's statements write it.

-- name: node_events.page
-- other: read; the newest journal first, for ids of journals rise with time, and within it the newest event
SELECT e.journal_id, e.seq, e.event_id, e.type, to_ms(e.occurred_at) AS occurred_at_ms,
       to_ms(e.received_at) AS received_at_ms, e.recovered, e.payload
  FROM node_events e
 WHERE e.node_id = :node_id AND (e.journal_id, e.seq) < (:before_journal_id::text, :before_seq::bigint)
 ORDER BY e.journal_id DESC, e.seq DESC
 LIMIT :page_size;

-- name: node_events.gaps
-- other: read; what a journal had to drop before it was sent
SELECT g.journal_id, g.first_seq, g.last_seq, to_ms(g.noticed_at) AS noticed_at_ms
  FROM node_event_gaps g
 WHERE g.node_id = :node_id
 ORDER BY g.journal_id DESC, g.first_seq DESC
 LIMIT :page_size;
