"""PostgreSQL, the truth. The only SQL."""
