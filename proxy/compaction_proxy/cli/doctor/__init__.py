"""`doctor`: checks of the host, the store and the upstream; each finding says what mends it."""
