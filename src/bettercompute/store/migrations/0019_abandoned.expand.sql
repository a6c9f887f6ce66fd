-- What was abandoned is looked for by its node, which is to stop it, and by how long ago that was.
CREATE INDEX commands_abandoned_node ON commands (node_id) WHERE reason = 'abandoned';
CREATE INDEX commands_abandoned_end ON commands (finished_at) WHERE reason = 'abandoned';
