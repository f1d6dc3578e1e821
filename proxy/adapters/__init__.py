"""The outside world behind the ports: one third-party library per module."""
