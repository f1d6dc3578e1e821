"""Serves the JSON endpoints of the admin API."""
