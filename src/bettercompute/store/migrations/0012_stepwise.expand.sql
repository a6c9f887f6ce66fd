-- A run that is approved as a whole and sent in steps: its commands keep not_before = not_after after the approval, until
-- its maker releases them. A release before this one makes no such batches.
ALTER TABLE approval_batches ADD COLUMN stepwise boolean NOT NULL DEFAULT false;
