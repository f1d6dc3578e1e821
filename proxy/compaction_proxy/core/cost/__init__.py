"""Costs of requests and compactions, and the savings of compactions."""
