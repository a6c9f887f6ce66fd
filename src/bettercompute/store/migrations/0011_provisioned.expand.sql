-- By which attestor a token is redeemed. A credential for a machine that was prepared fixes its node, and says which
-- machine it is for, as far as the operator knew it: fields of HardwareClaims.
ALTER TABLE join_tokens
  ADD COLUMN attestor text COLLATE "C" NOT NULL DEFAULT 'join-token' CHECK (attestor IN ('join-token', 'provisioned')),
  ADD COLUMN machine jsonb NOT NULL DEFAULT '{}',
  ADD CONSTRAINT join_tokens_provisioned CHECK (attestor <> 'provisioned' OR node_id IS NOT NULL);
