"""The admin API, the pages, health and metrics, and who may use them."""
