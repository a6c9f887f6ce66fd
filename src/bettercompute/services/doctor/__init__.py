"""The checks of `doctor`: one small function each, in a file per area; `service.CHECKS` is the table."""
