"""Holds the command `doctor`, which checks this machine, the store and the upstream, and suggests fixes."""
