-- A clone may be connected to any gateway, and must be told by it who else claims its identity: the notice is kept with
-- the revocation (a serialized RevocationNotice without its serials). NULL: the reason says it all.
ALTER TABLE node_certs ADD COLUMN revocation_notice bytea;
