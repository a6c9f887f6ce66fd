-- Expiry alone may use this index. Its predicate was dispatch's condition too, and with statistics of a moment when
-- nothing was pending the planner took it for dispatch as well, reading all of it once for each node. Now a query must
-- say a bound that excludes nothing to be given it.
DROP INDEX commands_deadline;
CREATE INDEX commands_deadline ON commands (not_after) WHERE state = 1 AND not_after < 'infinity';
