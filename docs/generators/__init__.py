"""One module per generated page, or kind of page. Each returns text and touches nothing."""
