"""Holds the command `doctor`, which checks host, store and upstream. Each finding names a fix."""
