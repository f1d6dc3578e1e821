"""Agents ask over MCP: four tools about what was removed from conversations, and how these stand."""
