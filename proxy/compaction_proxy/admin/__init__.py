"""The admin API, the admin pages, health checks and metrics, and the check of admin keys."""
