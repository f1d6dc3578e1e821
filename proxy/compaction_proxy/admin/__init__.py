"""Serves the admin API, the admin pages, health checks and metrics, and checks admin keys."""
