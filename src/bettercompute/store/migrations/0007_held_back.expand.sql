-- In flight in the present epoch and not sent in it: what a resume held back for want of credits, or a node refused BUSY
-- after it had accepted it once. Only `commands why` reads it; the sessions know by themselves.
ALTER TABLE commands ADD COLUMN held_back boolean NOT NULL DEFAULT false;
