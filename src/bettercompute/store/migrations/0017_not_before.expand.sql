-- A command that is not to be sent before some moment. `asked_not_before` is what its body says and stays; `not_before` is
-- from when dispatch may take it, which a back-off, or a hold until approvers have signed, moves.
ALTER TABLE commands ADD COLUMN asked_not_before timestamptz;
-- What may go stands apart from what waits for its time, so that neither dispatch nor its poll reads past the latter: a
-- million commands for tonight cost nothing by day. Each index's predicate is said by the statements that are meant for
-- it and by no other. A release before this one finds a node's pending commands by commands_node meanwhile.
DROP INDEX commands_pending;
CREATE INDEX commands_ready ON commands (node_id, lane, seq) WHERE state = 1 AND not_before IS NULL;
CREATE INDEX commands_later ON commands (node_id, lane, not_before) WHERE state = 1 AND not_before > '-infinity';
CREATE INDEX commands_due ON commands (not_before) WHERE state = 1 AND not_before < 'infinity';
