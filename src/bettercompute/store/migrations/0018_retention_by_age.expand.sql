-- Retention finds what is old by its age. Without these it read each table whole, every minute, for a month's worth of it.
CREATE INDEX node_event_gaps_noticed ON node_event_gaps (noticed_at);
CREATE INDEX join_tokens_expiry ON join_tokens (expires_at);
CREATE INDEX approval_batches_end ON approval_batches (not_after);
