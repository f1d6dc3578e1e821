"""MCP for agents: four tools about what was removed from conversations, and how these stand."""
