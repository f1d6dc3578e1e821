"""The JSON endpoints of the admin API."""
